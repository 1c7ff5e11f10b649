"""The command line itself: commands made of options, their help, and the spellings of peers."""
