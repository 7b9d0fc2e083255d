/** The files of the workspace: browse, view, download. */
import { html } from "./lib.js";
import { blob } from "./api.js";
import { CopyButton } from "./markdown.js";
import { Picture } from "./pictures.js";
import { Waiting, bytes, useAction, useLoad, when } from "./views.js";

/**
 * @param {string[]} parts
 * @param {string} [kind]
 */
const hashOf = (parts, kind = "folder") => `#/${kind === "file" ? "file" : "files"}${parts.map((part) => `/${encodeURIComponent(part)}`).join("")}`;

/** @param {{name: string, rest: string[]}} props */
export function View({ name, rest }) {
  const parts = rest.filter(Boolean);
  const path = encodeURIComponent(parts.join("/") || ".");
  const folder = useLoad(name === "files" ? `files?path=${path}` : "");
  const isFile = name === "file" || (Boolean(folder.error) && parts.length > 0); // a link may point to a file or a folder
  const file = useLoad(isFile ? `files/text?path=${path}` : "");
  return html`<div class="view">
    <nav aria-label="Folder"><ol class="crumbs">
      <li><a href="#/files">workspace</a></li>
      ${parts.map((part, index) => html`<li key=${index}><a href=${hashOf(parts.slice(0, index + 1), isFile && index === parts.length - 1 ? "file" : "folder")}
        aria-current=${index === parts.length - 1 ? "page" : undefined} dir="auto">${part}</a></li>`)}
    </ol></nav>
    ${isFile ? html`<${Waiting} data=${file.data} error=${file.error} />
        ${file.data && html`<${File} key=${path} file=${file.data} name=${parts[parts.length - 1]} />`}`
      : html`<${Waiting} data=${folder.data} error=${folder.error} />
        ${folder.data && html`<${Folder} folder=${folder.data} parts=${parts} />`}`}
  </div>`;
}

/** @param {{folder: any, parts: string[]}} props */
function Folder({ folder, parts }) {
  if (!folder.entries.length) return html`<p class="hint">This folder is empty.</p>`;
  return html`<div class="scroll"><table class="data"><caption class="hidden">Files</caption>
    <thead><tr><th scope="col">Name</th><th scope="col" class="number">Size</th><th scope="col">Changed</th></tr></thead>
    <tbody>${folder.entries.map((/** @type {any} */ one) => html`<tr key=${one.name}>
      <td>${one.kind === "other" ? one.name : html`<a href=${hashOf([...parts, one.name], one.kind)} dir="auto">${one.name}${one.kind === "folder" ? "/" : ""}</a>`}
        ${one.kind === "link" && html` <span class="badge">link</span>`}</td>
      <td class="number">${one.kind === "file" ? bytes(one.size) : ""}</td>
      <td>${one.modified_at ? when(one.modified_at) : ""}</td></tr>`)}</tbody></table></div>
    ${folder.more && html`<p class="hint">There are more files than are shown.</p>`}`;
}

/** @param {{file: any, name: string}} props */
function File({ file, name }) {
  const { run, error, isBusy } = useAction();
  const address = `files/data?path=${encodeURIComponent(file.path)}`;
  const download = () => run(async () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await blob(address));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
  return html`<p class="row"><span class="lead">${bytes(file.size)}, changed ${when(file.modified_at)}</span>
      <button type="button" class="small" disabled=${isBusy} onClick=${download}>Download</button>
      ${file.text && html`<${CopyButton} text=${file.text} />`}</p>
    ${error && html`<p class="notice is-error" role="alert">${error}</p>`}
    ${file.picture ? html`<${Picture} address=${address} name=${name} />`
      : file.text === null ? html`<p class="hint">This file is not text. Download it to look at it.</p>`
      : html`<pre class="shown" tabindex="0" dir="auto">${file.text}</pre>`}
    ${file.cut && html`<p class="hint">Only the beginning is shown.</p>`}`;
}
