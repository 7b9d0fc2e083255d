/** The composer: the message, its attached files, and completion. */
import { html, classes, useEffect, useRef, useState } from "./lib.js";

/** @param {{session: import("./session.js").Session, isRunning: boolean}} props */
export function Composer({ session, isRunning }) {
  const input = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const [text, setText] = useState(localStorage.getItem(session.draft) ?? "");
  const [error, setError] = useState("");
  const [media, setMedia] = useState(/** @type {{name: string, path: string}[]} */ ([]));
  const [isOver, setOver] = useState(false);
  const [offer, setOffer] = useState(/** @type {import("./completion.js").Completion & {index: number} | null} */ (null));
  const picker = useRef(/** @type {HTMLInputElement | null} */ (null));

  useEffect(() => {
    if (matchMedia("(hover: hover)").matches) input.current?.focus();
  }, [session]);

  /** @param {string} value */
  const change = (value) => {
    setText(value);
    if (value) localStorage.setItem(session.draft, value);
    else localStorage.removeItem(session.draft);
  };
  const idea = session.idea.value;
  useEffect(() => {
    if (!idea) return;
    change(idea);
    session.idea.value = "";
    input.current?.focus();
  }, [idea]);
  /** Offer completions for the word before the cursor. */
  const suggest = async () => {
    const before = input.current?.value.slice(0, input.current.selectionStart) ?? "";
    if (!/^\/|@/.test(before)) return setOffer(null);
    const { complete } = await import("./completion.js");
    const found = await complete(before).catch(() => null);
    const field = input.current;
    if (field?.value.slice(0, field.selectionStart) !== before) return; // the text has changed in the meantime
    setOffer(found && found.choices.length && document.activeElement === field ? { ...found, index: 0 } : null);
  };
  /** @param {number} index */
  const take = (index) => {
    const field = input.current;
    if (!field || !offer) return;
    field.setRangeText(offer.choices[index].text, offer.from, field.selectionStart, "end");
    change(field.value);
    setOffer(null);
    field.focus();
  };
  const send = async () => {
    setOffer(null);
    const said = text.trim() || (media.length ? "See the attached." : "");
    if (!said) return;
    change("");
    setMedia([]);
    setError("");
    try {
      await session.send(said, media.map((one) => one.path));
    } catch (failed) {
      setMedia(media);
      change(said);
      setError(String(/** @type {Error} */ (failed).message));
    }
  };
  /** @param {DataTransfer | HTMLInputElement | null | undefined} from */
  const attach = async (from) => {
    const files = [...(from?.files ?? [])];
    setError("");
    try {
      if (!files.length) return;
      const { upload } = await import("./actions.js");
      for (const file of files) {
        const path = await upload(file);
        setMedia((before) => [...before, { name: file.name || "pasted", path }]);
      }
    } catch (failed) {
      setError(String(/** @type {Error} */ (failed).message));
    }
  };
  /** @param {DragEvent} event */
  const onDrag = (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    setOver(event.type === "dragover");
    if (event.type === "drop") attach(event.dataTransfer);
  };
  /** @param {ClipboardEvent} event */
  const onPaste = (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    attach(event.clipboardData);
  };
  /** @param {KeyboardEvent} event */
  const onKey = (event) => {
    if (offer && !event.isComposing && ["ArrowDown", "ArrowUp", "Enter", "Tab", "Escape"].includes(event.key)) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      const chosen = offer.choices[offer.index];
      const isWhole = chosen.text === text; // a complete command is sent at once
      if (!isWhole || event.key !== "Enter") {
        event.preventDefault();
        if (step) setOffer({ ...offer, index: (offer.index + step + offer.choices.length) % offer.choices.length });
        else if (event.key === "Escape") setOffer(null);
        else take(offer.index);
        return;
      }
    }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && isRunning) {
      event.preventDefault();
      session.stop();
    }
  };
  return html`<form class=${classes("composer", isOver && "is-over")} onDragOver=${onDrag} onDragLeave=${onDrag} onDrop=${onDrag} onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); send(); }}>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
    ${media.length > 0 && html`<ul class="media" aria-label="Attached">${media.map((one) => html`<li key=${one.path}>
      <span dir="auto">${one.name}</span><button type="button" class="quiet small" aria-label=${`Remove ${one.name}`}
        onClick=${() => setMedia(media.filter((other) => other !== one))}>×</button></li>`)}</ul>`}
    ${offer && html`<ul class="offer" id="offer" role="listbox" aria-label="Completions">${offer.choices.map((choice, index) => html`
      <li role="option" id=${`offer-${index}`} key=${choice.label} aria-selected=${index === offer.index} onMouseDown=${(/** @type {Event} */ event) => event.preventDefault()}
        onClick=${() => take(index)}><span dir="auto">${choice.label}</span> <span class="about">${choice.about}</span></li>`)}</ul>
      <p class="hidden" role="status">${offer.choices.length} completions, Tab takes one</p>`}
    <div class=${classes("field", isRunning && "is-running")}>
      <input type="file" class="hidden" ref=${picker} multiple tabindex="-1" aria-label="Files to attach"
        onChange=${(/** @type {any} */ event) => { attach(event.target); event.target.value = ""; }} />
      <button class="quiet" type="button" aria-label="Attach files" onClick=${() => picker.current?.click()}>
        <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 3.5v9M3.5 8h9" /></svg></button>
      <textarea ref=${input} rows="1" dir="auto" aria-label="Message" enterkeyhint="send" value=${text}
        placeholder=${isRunning ? "Steer the agent…" : "Message the agent…"}
        aria-autocomplete="list" aria-controls=${offer ? "offer" : undefined} aria-activedescendant=${offer ? `offer-${offer.index}` : undefined}
        onInput=${(/** @type {any} */ event) => { change(event.target.value); suggest(); }} onBlur=${() => setOffer(null)}
        onKeyDown=${onKey} onPaste=${onPaste}></textarea>
      ${isRunning && html`<button class="stop" type="button" onClick=${() => session.stop()} aria-label="Stop">
        <svg viewBox="0 0 16 16" aria-hidden="true"><rect x="4" y="4" width="8" height="8" rx="1.5" /></svg></button>`}
      <button class="primary send" type="submit" disabled=${!text.trim() && !media.length} aria-label="Send">
        <svg viewBox="0 0 16 16" aria-hidden="true"><path d="M8 13V3.5M3.8 7.5 8 3.2l4.2 4.3" /></svg></button>
    </div>
  </form>`;
}
