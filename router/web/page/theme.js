// Before anything is drawn, so that a dark page does not begin in white.
document.documentElement.dataset.theme = localStorage.getItem("tandem.theme") ?? "auto";
