/** Memory and skills: read them, and edit those that the policy allows to be edited. */
import { html, useEffect, useState } from "./lib.js";
import { api } from "./api.js";
import { titleOf } from "./sidebar.js";
import { Diff } from "./tools.js";
import { Waiting, sessionHash, useAction, useLoad, when } from "./views.js";

/** @param {{rest: string[]}} props */
export function View({ rest }) {
  const { data, error } = useLoad("memory");
  const path = rest.join("/");
  const files = /** @type {any[]} */ (data?.files ?? []);
  const chosen = files.find((one) => one.path === path) ?? files[0];
  return html`<div class="view">
    <${Waiting} data=${data} error=${error} />
    ${chosen && html`<div class="split">
      <nav aria-label="Memory and skills">
        ${["memory", "skill"].map((kind) => html`<h2 key=${kind}>${kind === "memory" ? "Memory" : "Skills"}</h2>
          <ul class="list">${files.filter((one) => one.kind === kind).map((one) => html`<li key=${one.path}>
            <a href=${`#/memory/${encodeURIComponent(one.path)}`} aria-current=${one === chosen ? "page" : undefined}>
              ${one.name}${!one.editable && html` <span class="badge">shipped</span>`}
              ${one.problem && html` <span class="badge is-bad">broken</span>`}
              <span class="sub" dir="auto">${one.problem || one.about}</span></a></li>`)}</ul>`)}
      </nav>
      <${Editor} key=${chosen.path} file=${chosen} />
    </div>`}
  </div>`;
}

/** @param {{file: any}} props */
function Editor({ file }) {
  const [text, setText] = useState(/** @type {string | null} */ (null));
  const [digest, setDigest] = useState("");
  const [failed, setFailed] = useState("");
  const [isSaved, setSaved] = useState(false);
  const { run, error, isBusy } = useAction(() => setSaved(true));
  const read = async () => {
    try {
      const found = await api(`memory/text?path=${encodeURIComponent(file.path)}`);
      setText(found.text);
      setDigest(found.digest);
      setFailed("");
    } catch (problem) {
      setFailed(String(/** @type {Error} */ (problem).message));
    }
  };
  useEffect(() => void read(), []);
  const save = () => run(async () => {
    setSaved(false);
    const saved = await api("memory", { path: file.path, text, digest });
    setDigest(saved.digest);
  });
  if (failed) return html`<p class="notice is-error" role="alert">${failed}</p>`;
  if (text === null) return html`<p class="hint" role="status">Loading…</p>`;
  return html`<section aria-label=${file.name}>
    <label class="hint" for="editor"><code>${file.path}</code></label>
    <textarea id="editor" class="editor" dir="auto" spellcheck="false" value=${text} readonly=${!file.editable}
      onInput=${(/** @type {any} */ event) => { setText(event.target.value); setSaved(false); }}></textarea>
    ${file.editable && html`<p class="row"><button type="button" class="primary small" disabled=${isBusy} onClick=${save}>Save</button>
      <button type="button" class="small" disabled=${isBusy} onClick=${read}>Read again</button>
      ${isSaved && html`<span class="notice" role="status">Saved.</span>`}</p>`}
    ${error && html`<p class="notice is-error" role="alert" dir="auto">${error}</p>`}
    <${History} path=${file.path} />
  </section>`;
}

/** The history of what the agent has written into a file. @param {{path: string}} props */
function History({ path }) {
  const { data } = useLoad(`memory/history?path=${encodeURIComponent(path)}`);
  const changes = /** @type {any[]} */ (data?.changes ?? []);
  if (!changes.length) return null;
  return html`<h2>What the agent wrote</h2>
    <ul class="cards" aria-label="Changes">${changes.map((one) => html`<li class="card" key=${`${one.session}${one.seq}`}>
      <p class="top"><a href=${sessionHash(one.session)} dir="auto">${titleOf(one.session)}</a>
        ${one.status !== "ok" && html`<span class="badge is-bad">${one.status}</span>`}<span class="meta">${when(one.at)}</span></p>
      <${Diff} path=${one.before ? "a part" : "the whole file"} before=${one.before} after=${one.after} /></li>`)}</ul>`;
}
