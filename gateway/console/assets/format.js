// Numbers, units, money and times, everywhere the same.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";
const is = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));

export const count = (value) => (is(value) ? whole.format(value) : NONE);
export const compact = (value) => (is(value) ? (Math.abs(value) < 10000 ? whole.format(value) : short.format(value)) : NONE);
export const rate = (value) => (is(value) ? (Math.abs(value) < 100 ? tenths.format(value) : compact(value)) : NONE);
/** Little is not nothing, and almost all is not all. */
export function percent(share) {
  if (!is(share)) return NONE;
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  if (share < 1 && share >= 0.9995) return "> 99.9 %";
  return `${tenths.format(100 * share)} %`;
}

/** With the same digits in each row of a column; nothing is just 0. */
const tenth = (value) => Number(value).toFixed(Number(value) ? 1 : 0);

/** Milliseconds, in the unit that reads best. */
export function ms(value) {
  if (!is(value)) return NONE;
  if (value < 10) return `${tenth(value)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60000) return `${(value / 1000).toFixed(value < 10000 ? 2 : 1)} s`;
  return span(value / 1000);
}

/** Seconds, roughly. */
export function span(seconds) {
  if (!is(seconds)) return NONE;
  if (seconds < 100) return `${tenth(seconds)} s`;
  if (seconds < 3600) return `${tenth(seconds / 60)} min`;
  if (seconds < 172800) return `${tenth(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function bytes(value) {
  if (!is(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${tenths.format(value)} ${units[at]}`;
}

/** Millionths of the currency's unit. */
export function money(micros, currency) {
  if (!is(micros)) return NONE;
  const units = micros / 1e6;
  const digits = units !== 0 && Math.abs(units) < 1 ? 6 : 2;
  return `${units.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${currency}`;
}

const pad = (number) => String(number).padStart(2, "0");
/** Unix seconds as 2026-11-22 04:10:05, by the clock of whoever looks. */
export function at(unixSeconds) {
  if (!is(unixSeconds)) return NONE;
  const when = new Date(1000 * unixSeconds);
  return `${day(unixSeconds)} ${pad(when.getHours())}:${pad(when.getMinutes())}:${pad(when.getSeconds())}`;
}
export function day(unixSeconds) {
  const when = new Date(1000 * unixSeconds);
  return `${when.getFullYear()}-${pad(when.getMonth() + 1)}-${pad(when.getDate())}`;
}
/** The day in UTC, by which the ledger counts. */
export const utcDay = (unixSeconds) => new Date(1000 * unixSeconds).toISOString().slice(0, 10);

export const plural = (number, one, many) => `${count(number)} ${Number(number) === 1 ? one : many || `${one}s`}`;
