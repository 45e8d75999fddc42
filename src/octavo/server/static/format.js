// Numbers and elements as this page writes them. Text always goes through textContent, never through markup.

const count = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A DOM element with a class and children; strings become text. */
export function element(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export const $ = (id) => document.getElementById(id);

export function formatCount(value) {
  return value == null ? "–" : count.format(value);
}

export function formatRatio(value) {
  if (value == null) return "–";
  const percent = value * 100;
  return percent > 0 && percent < 9.95 ? `${percent.toFixed(1)}%` : `${percent.toFixed(0)}%`;
}

/** A rate or another number that may be small: three digits that matter. */
export function formatNumber(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 100) return count.format(value);
  return Number.isInteger(value) ? String(value) : value.toFixed(Math.abs(value) >= 10 ? 1 : 2);
}

export function formatBytes(bytes) {
  if (bytes == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 && power < units.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${power === 0 ? count.format(bytes) : bytes.toFixed(bytes < 100 ? 1 : 0)} ${units[power]}`;
}

export function formatSeconds(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function plural(number, word) {
  return `${formatCount(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** The beginning of a request's id, and which of its answers it is. */
export function shortenId(id) {
  const [name, answer] = id.split("/");
  return (name.length > 20 ? `${name.slice(0, 18)}…` : name) + (answer ? `/${answer}` : "");
}

/** Text in which `words between backticks` become code. */
export function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? element("code", "", part) : part));
}

/** Writes text only where it changed, so that a still page is left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
