/** The view library: preact, signals, and htm's templates bound to preact. */
import { h, render, Fragment } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { h, render, Fragment };
export { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";
export { signal, computed, effect, batch } from "./vendor/signals.js";

/** Build nodes from a template. Values are always text or nodes, never HTML. */
export const html = htm.bind(h);

/**
 * Join class names, leaving out false ones.
 * @param {...(string | false | null | undefined)} names
 */
export const classes = (...names) => names.filter(Boolean).join(" ");
