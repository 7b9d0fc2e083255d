/** The file changes of the last turn that made any, and how to undo them. */
import { html, useState } from "./lib.js";
import { api, sessionPath } from "./api.js";
import { Diff } from "./tools.js";
import { Waiting, sessionHash, useAction, useLoad } from "./views.js";

/** @typedef {{path: string, before: string | null, after: string | null, note: string}} ChangedFile */

/** @param {{rest: string[]}} props */
export function View({ rest: [key] }) {
  const { data, error, reload } = useLoad(sessionPath(key, "changes"));
  const [done, setDone] = useState(/** @type {{restored: string[], kept: string[]} | null} */ (null));
  const { run, error: failed, isBusy } = useAction(reload);
  const files = /** @type {ChangedFile[]} */ (data?.files ?? []);
  const undo = () => run(async () => setDone(await api(sessionPath(key, "undo"), {})));
  return html`<div class="view">
    <p class="row"><a href=${sessionHash(key)}>Back to the chat</a>
      ${files.length > 0 && html`<button type="button" class="small" disabled=${isBusy} onClick=${undo}>Undo these changes</button>`}</p>
    <p class="lead">The files that the last turn changed. Undo leaves a file alone if it has changed since.</p>
    <${Waiting} data=${data} error=${error} />
    ${failed && html`<p class="notice is-error" role="alert" dir="auto">${failed}</p>`}
    ${done && html`<div role="status">
      ${done.restored.length > 0 && html`<p class="notice">Restored: ${done.restored.join(", ")}</p>`}
      ${done.kept.map((words) => html`<p class="notice is-error" key=${words} dir="auto">${words}</p>`)}</div>`}
    ${data && !files.length && html`<p class="hint">No turn of this session has changed files that can be undone.</p>`}
    ${files.map((file) => html`<section key=${file.path} aria-label=${file.path}>
      ${file.note ? html`<p class="card"><code>${file.path}</code> <span class="lead">${file.note}</span></p>`
        : html`<${Diff} path=${file.path} before=${file.before ?? ""} after=${file.after ?? ""} />`}
      ${!file.note && file.after === null && html`<p class="hint">The file was removed.</p>`}
      ${!file.note && file.before === null && html`<p class="hint">The file is new.</p>`}</section>`)}
  </div>`;
}
