/** The command palette: open a session by its title, open a view, or start a new chat. */
import { html, useEffect, useRef, useState } from "./lib.js";
import { LINKS, sessionHash, sessions } from "./sidebar.js";

/** @param {{onClose: () => void}} props */
export function Palette({ onClose }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [query, setQuery] = useState("");
  const [index, setIndex] = useState(0);
  useEffect(() => dialog.current?.showModal(), []);
  const wanted = query.trim().toLowerCase();
  const items = [{ title: "New chat", href: "#/new" }, ...LINKS.map(([name, title]) => ({ title, href: `#/${name}` })), ...sessions.value.map((one) => ({ title: one.title, href: sessionHash(one.key) }))]
    .filter((item) => item.title.toLowerCase().includes(wanted))
    .slice(0, 12);
  /** @param {string} href */
  const go = (href) => {
    location.hash = href;
    onClose();
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (event.key === "ArrowDown") setIndex(Math.min(index + 1, items.length - 1));
    else if (event.key === "ArrowUp") setIndex(Math.max(index - 1, 0));
    else if (event.key === "Enter" && items[index]) go(items[index].href);
    else return;
    event.preventDefault();
  };
  return html`<dialog class="palette" ref=${dialog} onClose=${onClose} aria-label="Go to">
    <input type="text" role="combobox" aria-expanded="true" aria-controls="palette-items" aria-label="Go to a session or a view"
      aria-activedescendant=${items.length ? `palette-${index}` : undefined} placeholder="Go to…" value=${query} autofocus
      onInput=${(/** @type {any} */ event) => { setQuery(event.target.value); setIndex(0); }} onKeyDown=${onKey} />
    <ul id="palette-items" role="listbox" aria-label="Sessions and views">${items.map((item, number) => html`<li role="option" key=${item.href}
      id=${`palette-${number}`} aria-selected=${number === index} onClick=${() => go(item.href)} dir="auto">${item.title}</li>`)}</ul>
  </dialog>`;
}
