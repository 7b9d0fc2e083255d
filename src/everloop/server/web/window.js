/** A virtual list: only the part near the screen is in the document. */
import { useLayoutEffect, useRef, useState } from "./lib.js";

const CHUNK = 20; // entries that are shown or hidden together
const GUESS = 1500; // the assumed height, in pixels, of a chunk that was never shown

/**
 * Split entries into chunks. A chunk keeps its entries whatever else is loaded, so that its height stays valid.
 * @param {import("./session.js").Entry[]} entries in the order of their positions
 */
export function chunksOf(entries) {
  /** @type {{id: number, entries: import("./session.js").Entry[]}[]} */
  const chunks = [];
  for (const entry of entries) {
    const id = Math.floor(entry.seq / CHUNK);
    const last = chunks[chunks.length - 1];
    if (last?.id === id) last.entries.push(entry);
    else chunks.push({ id, entries: [entry] });
  }
  return chunks;
}

/**
 * Return which chunks are near the screen, and the height of those before and after them. The visible part does not move
 * when chunks above it are added or removed.
 * @param {{current: HTMLElement | null}} scroller
 * @param {{current: boolean}} follows whether to keep the end in view
 * @param {number[]} ids of the chunks
 */
export function useWindow(scroller, follows, ids) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const heights = useRef(/** @type {Map<number, number>} */ (new Map()));
  const anchor = useRef({ element: /** @type {Element | null} */ (null), top: 0, end: 0 });
  const [, redraw] = useState(0);

  /** @param {number} from @param {number} to */
  const sum = (from, to) => {
    let pixels = 0;
    for (let place = from; place < to; place++) pixels += heights.current.get(ids[place]) ?? GUESS;
    return pixels;
  };
  const choose = () => {
    const screen = scroller.current?.clientHeight || 800;
    let [from, to] = [ids.length, ids.length];
    if (follows.current || !box.current || !scroller.current) {
      for (let pixels = 0; from > 0 && pixels < 2 * screen; from--) pixels += sum(from - 1, from);
      return [from, to];
    }
    // Relative to the end, because entries that are loaded in the meantime come before.
    let end = sum(0, ids.length);
    const top = end - (box.current.getBoundingClientRect().bottom - scroller.current.getBoundingClientRect().top);
    while (to > 1 && end - sum(to - 1, to) > top + 2 * screen) end -= sum(--to, to + 1);
    for (from = to; from > 0 && end > top - screen; from--) end -= sum(from - 1, from);
    return [Math.min(from, Math.max(to - 1, 0)), to];
  };
  const [from, to] = choose();
  const shown = useRef([from, to]);
  shown.current = [ids[from], ids[to - 1]];

  const shownChunks = () => /** @type {HTMLElement[]} */ ([...(box.current?.children ?? [])].slice(1, -1)); // between the two spacers
  /** Remember what is visible now. */
  const hold = () => {
    if (!scroller.current) return;
    const { top, bottom } = scroller.current.getBoundingClientRect();
    const end = scroller.current.scrollHeight - scroller.current.scrollTop;
    anchor.current = { element: null, top: 0, end };
    for (const element of shownChunks().flatMap((chunk) => (chunk.getBoundingClientRect().bottom > top ? [...chunk.children] : []))) {
      const place = element.getBoundingClientRect();
      if (place.bottom <= top) continue;
      if (place.top < bottom) anchor.current = { element, top: place.top, end };
      break;
    }
  };
  /** Restore its position, or scroll to the end. */
  const restore = () => {
    const element = scroller.current;
    if (!element) return;
    if (follows.current) element.scrollTop = element.scrollHeight;
    else {
      const { element: held, top, end } = anchor.current;
      const moved = held?.isConnected ? held.getBoundingClientRect().top - top : element.scrollHeight - end - element.scrollTop;
      if (Math.abs(moved) >= 1) element.scrollTop += moved;
    }
  };
  /** Update which chunks are shown. */
  const look = () => {
    const [first, last] = choose();
    if (ids[first] !== shown.current[0] || ids[last - 1] !== shown.current[1]) redraw((count) => count + 1);
  };

  useLayoutEffect(() => {
    for (const element of shownChunks()) heights.current.set(Number(element.dataset.chunk), element.getBoundingClientRect().height);
    restore();
    hold();
    look();
  });
  return { box, from, to, before: sum(0, from), after: sum(to, ids.length), hold, restore, look };
}
