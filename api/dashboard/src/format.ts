// Numbers as people read them: three digits at most, always with a unit. What is not known is a dash.

const NONE = "–";

type Maybe = number | null | undefined;

const known = (value: Maybe): value is number => value !== null && value !== undefined && Number.isFinite(value);

/** Digits after the point so that about three are shown. */
function digits(value: number): string {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 99.95) return value.toFixed(0);
  return value.toFixed(size >= 9.995 ? 1 : 2);
}

/** 1234567 -> "1,234,567". */
export const whole = (value: Maybe): string =>
  known(value) ? Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",") : NONE;

/** 12345 -> "12.3k". */
export function short(value: Maybe): string {
  if (!known(value)) return NONE;
  if (Math.abs(value) >= 999_950) return `${digits(value / 1e6)}M`;
  if (Math.abs(value) >= 9_999.5) return `${digits(value / 1e3)}k`;
  return Number.isInteger(value) ? whole(value) : digits(value);
}

/** Per second. */
export function rate(value: Maybe, unit = ""): string {
  if (!known(value)) return NONE;
  const space = unit === "" ? "" : " ";
  return `${short(Math.abs(value) >= 99.95 ? Math.round(value) : value)}${space}${unit}/s`;
}

/** Seconds in the unit that fits. */
export function time(seconds: Maybe): string {
  if (!known(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 99.95) return `${Number.isInteger(seconds) ? seconds : digits(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** 0.1234 -> "12.3 %". */
export function percent(share: Maybe): string {
  if (!known(share)) return NONE;
  return share > 0 && share < 0.00005 ? "< 0.01 %" : `${digits(share * 100)} %`;
}

/** A probability. */
export const chance = (p: Maybe): string => (known(p) ? p.toFixed(3) : NONE);

/** Part of a whole; null of nothing. */
export const ratio = (part: number, all: number): number | null => (all > 0 ? part / all : null);

/** More entries of a list are counted, not shown. */
const LIST_MAX = 6;

/** A value of a snapshot: durations are written as `{secs, nanos}`. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "number") return Number.isInteger(value) ? whole(value) : `${Number(value.toPrecision(4))}`;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string") return value;
  if (Array.isArray(value)) {
    if (value.some((entry) => typeof entry === "object")) return value.length === 1 ? "1 entry" : `${value.length} entries`;
    const more = value.length > LIST_MAX ? ` … ${value.length} in all` : "";
    return value.length === 0 ? "none" : value.slice(0, LIST_MAX).map(plain).join(", ") + more;
  }
  if (isDuration(value)) return time(value.secs + value.nanos / 1e9);
  return JSON.stringify(value);
}

export const isDuration = (value: unknown): value is { secs: number; nanos: number } =>
  typeof value === "object" && value !== null && "secs" in value && "nanos" in value && Object.keys(value).length === 2;

/** 1 -> "1 request", 2 -> "2 requests". */
export const counted = (count: number, name: string): string => `${whole(count)} ${name}${count === 1 ? "" : "s"}`;

/** "inter_model" -> "inter model". */
export const words = (name: string): string => name.replaceAll("_", " ");
