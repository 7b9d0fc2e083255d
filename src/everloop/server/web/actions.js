/** Actions on messages (retry, edit, fork) and on whole sessions (rename, export, archive, delete), and uploads. */
import { html, useEffect, useRef, useState } from "./lib.js";
import { api, blob, sessionPath } from "./api.js";
import { refresh, sessionHash, titleOf } from "./sidebar.js";
import { useAction } from "./views.js";

const FORMATS = [["md", "Markdown"], ["html", "Web page"], ["jsonl", "JSON lines"]];
const MOST = 20_000_000; // bytes of a file

/**
 * Open a copy of a session up to a position. If a turn was running there, it runs again.
 * @param {string} key
 * @param {number} until
 * @param {string} [draft] text to put into its composer
 */
export async function fork(key, until, draft) {
  let copy = "";
  if (until > 0) copy = (await api(sessionPath(key, "fork"), { until })).key;
  if (draft !== undefined) localStorage.setItem(`everloop.draft.${copy || "new"}`, draft);
  location.hash = copy ? sessionHash(copy) : "#/new";
  refresh();
}

/**
 * Upload a file into the workspace, and return its path for a message.
 * @param {File} file
 * @returns {Promise<string>}
 */
export async function upload(file) {
  if (file.size > MOST) throw new Error(`${file.name} is larger than 20 MB`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let binary = "";
  for (let start = 0; start < bytes.length; start += 32_768) binary += String.fromCharCode(...bytes.subarray(start, start + 32_768));
  return (await api("files/uploads", { name: file.name || "pasted", data: btoa(binary) })).path;
}

/** A dialog with the actions on a session. @param {{sessionKey: string, onClose: () => void}} props */
export function SessionMenu({ sessionKey, onClose }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [typed, setTitle] = useState(/** @type {string | null} */ (null));
  const [found, setFound] = useState(/** @type {{archived?: boolean, title?: string}} */ ({}));
  const title = typed ?? found.title ?? titleOf(sessionKey);
  const { run, error, isBusy } = useAction(refresh);
  useEffect(() => {
    api("sessions?archived=1").then((list) => setFound(list.sessions.find((/** @type {any} */ one) => one.key === sessionKey) ?? {}), () => undefined);
  }, [sessionKey]);
  useEffect(() => dialog.current?.showModal(), []);
  /** @param {Event} event */
  const rename = (event) => {
    event.preventDefault();
    run(() => api(sessionPath(sessionKey, "title"), { title })).then(onClose);
  };
  /** @param {string} form */
  const save = (form) => run(async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await blob(sessionPath(sessionKey, `export?format=${form}`)));
    link.download = `${sessionKey.replace(/[^\w-]+/g, "-")}.${form}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
  const isArchived = found.archived ?? false;
  const archive = () => run(async () => {
    await api(sessionPath(sessionKey, "archive"), { archived: !isArchived });
    if (!isArchived) location.hash = "#/new";
    onClose();
  });
  const remove = () => confirm(`Delete “${titleOf(sessionKey)}” and its whole log? This cannot be undone.`) && run(async () => {
    await api(sessionPath(sessionKey, "delete"), {});
    location.hash = "#/new";
    onClose();
  });
  return html`<dialog class="palette" ref=${dialog} onClose=${onClose} aria-label="This session">
    <form class="row" onSubmit=${rename}><label class="grow">Title
      <input type="text" value=${title} maxlength="80" dir="auto" onInput=${(/** @type {any} */ event) => setTitle(event.target.value)} /></label>
      <button type="submit" class="primary" disabled=${isBusy}>Rename</button></form>
    <p class="row"><a href=${`#/timeline/${encodeURIComponent(sessionKey)}`} onClick=${onClose}>Timeline</a>
      <a href=${`#/changes/${encodeURIComponent(sessionKey)}`} onClick=${onClose}>Changes</a></p>
    <h2>Export</h2>
    <p class="row">${FORMATS.map(([form, words]) => html`<button key=${form} type="button" disabled=${isBusy} onClick=${() => save(form)}>${words}</button>`)}</p>
    <p class="hint">Keys and tokens are redacted.</p>
    <h2>Archive</h2>
    <p class="row"><button type="button" disabled=${isBusy} onClick=${archive}>${isArchived ? "Remove from the archive" : "Archive"}</button></p>
    <p class="hint">An archived session is not in the list. Search finds it, and a message brings it back.</p>
    <p class="row"><button type="button" class="danger" disabled=${isBusy} onClick=${remove}>Delete</button>
      <button type="button" onClick=${onClose}>Close</button></p>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </dialog>`;
}
