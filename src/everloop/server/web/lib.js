/** The view library: Preact, signals, and htm templates bound to Preact. */
import { h, render, Fragment } from "./vendor/preact.js";
import htm from "./vendor/htm.js";
import { useEffect, useState } from "./vendor/hooks.js";

export { h, render, Fragment };
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export { signal, computed, effect, batch } from "./vendor/signals.js";

/** Build nodes from a template. Its values are text or nodes, never HTML. */
export const html = htm.bind(h);

/**
 * Return a component whose module is loaded on first use.
 * @param {() => Promise<any>} load loads the component
 */
export function lazy(load) {
  /** @type {any} */
  let found = null;
  return function Lazy(/** @type {any} */ props) {
    const [component, setComponent] = useState(() => found);
    useEffect(() => {
      if (!component) load().then((loaded) => setComponent(() => (found = loaded)), () => undefined);
    }, []);
    return component ? h(component, props) : null;
  };
}

/**
 * Join class names, leaving out false ones.
 * @param {...(string | false | null | undefined)} names
 */
export const classes = (...names) => names.filter(Boolean).join(" ");

// Marks of direction, controls and blanks that can disguise a text; joiners and variants, which letters and emoji need.
const DISGUISES = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]|[\u200c\u200d\ufe00-\ufe0f]+/gu;

/**
 * Write out, as ‹U+202E›, the characters that change the order of others or are not seen. Where a person judges what runs, it
 * must not look like something else.
 * @param {string} text
 */
export const revealed = (text) => text.replace(DISGUISES, (found, /** @type {number} */ at) =>
  isNeeded(found, text[at - 1] ?? "", text[at + found.length] ?? "") ? found
    : Array.from(found, (one) => `‹U+${(one.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}›`).join(""));

/**
 * Whether a joiner or a variant belongs to the letters or the emoji around it.
 * @param {string} found
 * @param {string} before
 * @param {string} after
 */
function isNeeded(found, before, after) {
  if (!/^[\ufe00-\ufe0f]?[\u200c\u200d]?$/.test(found)) return false;
  if (after === "\u20e3") return true; // the frame of a digit
  return before > "\u007f" && (after > "\u007f" || !/[\u200c\u200d]/.test(found));
}
