// Number formats.

const decimals = [0, 1, 2, 3].map(digits => new Intl.NumberFormat("en",
  { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const percents = new Intl.NumberFormat("en", { style: "percent" });

/** A number with up to this many decimals. */
export const number = (value, digits = 0) => decimals[digits].format(value);

export const seconds = (value, digits = 0) => `${number(value, digits)} s`;

/** A share of 1 in whole percent. */
export const percent = share => percents.format(share);
