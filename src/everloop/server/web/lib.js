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
