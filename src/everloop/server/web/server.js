/** For the operator: the checks of `everloop doctor`, workers and their leases, and tokens. */
import { html, useState } from "./lib.js";
import { api } from "./api.js";
import { CopyButton } from "./markdown.js";
import { Waiting, span, useAction, useLoad, when } from "./views.js";

const EVERY = 5000;

export function View() {
  const workers = useLoad("workers", EVERY);
  if (workers.error && !workers.data) {
    return html`<div class="view"><p class="notice is-error" role="alert">${workers.error}</p>
      <p class="hint">Only an operator sees this: the user of this machine, or a token with the right admin.</p></div>`;
  }
  return html`<div class="view">
    <h2>Health</h2><${Health} />
    <h2>Workers and leases</h2><${Waiting} data=${workers.data} error=${workers.error} />
    ${workers.data && html`<${Workers} work=${workers.data} />`}
    <h2>Tokens</h2><${Tokens} />
  </div>`;
}

function Health() {
  const { data, error, reload } = useLoad("health");
  if (!data) return html`<${Waiting} data=${data} error=${error} />`;
  return html`<div class="scroll"><table class="data"><caption class="hidden">Checks</caption>
    <thead class="hidden"><tr><th scope="col">Check</th><th scope="col">State</th><th scope="col">Found</th></tr></thead>
    <tbody>${data.checks.map((/** @type {any} */ one) => html`<tr key=${one.name}>
      <td>${one.name}</td><td><span class=${`badge ${one.ok ? "is-good" : "is-bad"}`}>${one.ok ? "ok" : "wrong"}</span></td>
      <td class="found" dir="auto">${one.found}${one.fix && html`<br /><code>${one.fix}</code>`}</td></tr>`)}</tbody></table></div>
    <p><button type="button" class="small" onClick=${reload}>Check again</button></p>`;
}

/** @param {{work: any}} props */
function Workers({ work }) {
  const facts = [
    ["Turns", `${work.open_turns} open, ${work.parked_turns} waiting for a person`],
    ["Messages waiting", work.waiting ? `${work.waiting}, the oldest for ${span(work.waiting_seconds)}` : "none"],
    ["Answers not sent", work.unsent || "none"],
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${work.stuck.map((/** @type {any} */ one) => html`<p key=${one.session} class="notice is-error" role="alert">
      ${one.session} of ${one.owner} has work that no worker does, for ${span(one.seconds)}.</p>`)}
    <div class="scroll"><table class="data"><caption class="hidden">Workers</caption>
      <thead><tr><th scope="col">Worker</th><th scope="col">Process</th><th scope="col">Takes work</th>
        <th scope="col">Last heartbeat</th><th scope="col">Holds</th></tr></thead>
      <tbody>${work.workers.map((/** @type {any} */ one) => html`<tr key=${one.id}>
        <td><code>${one.id}</code></td><td>${one.process}</td><td>${one.takes_work ? "yes" : "its own"}</td>
        <td>${one.silent ? `${span(one.silent)} ago` : "alive"}</td>
        <td dir="auto">${work.leases.filter((/** @type {any} */ lease) => lease.worker === one.id)
          .map((/** @type {any} */ lease) => `${lease.session} of ${lease.owner}`).join(", ") || "nothing"}</td></tr>`)}</tbody></table></div>`;
}

function Tokens() {
  const { data, error, reload } = useLoad("tokens");
  const [made, setMade] = useState("");
  const action = useAction(reload);
  /** @param {any} token */
  const revoke = (token) => confirm(`Revoke “${token.name}” of ${token.owner}? What uses it stops working at once.`)
    && action.run(() => api(`tokens/${encodeURIComponent(token.id)}/revoke`, {}));
  if (!data) return html`<${Waiting} data=${data} error=${error} />`;
  return html`
    ${made && html`<div class="card" role="status"><p>The new token is shown only this once:</p>
      <p class="row"><code class="secret">${made}</code> <${CopyButton} text=${made} /></p></div>`}
    ${!data.tokens.length && html`<p class="hint">There are none. Once you make one, every request to the API needs a token, even on this machine.</p>`}
    ${data.tokens.length > 0 && html`<div class="scroll"><table class="data"><caption class="hidden">Tokens</caption>
      <thead><tr><th scope="col">Name</th><th scope="col">Owner</th><th scope="col">Rights</th><th scope="col">Made</th>
        <th scope="col">Last used</th><th scope="col"><span class="hidden">Revoke</span></th></tr></thead>
      <tbody>${data.tokens.map((/** @type {any} */ token) => html`<tr key=${token.id}>
        <td>${token.name}</td><td>${token.owner}</td><td>${token.rights.join(", ")}</td><td>${when(token.created_at)}</td>
        <td>${token.last_used_at ? when(token.last_used_at) : "never"}</td>
        <td>${token.revoked_at ? html`<span class="badge">revoked</span>` : html`<button type="button" class="small danger"
          aria-label=${`Revoke ${token.name}`} disabled=${action.isBusy} onClick=${() => revoke(token)}>Revoke</button>`}</td></tr>`)}</tbody></table></div>`}
    ${action.error && html`<p class="notice is-error" role="alert">${action.error}</p>`}
    <${NewToken} onMade=${(/** @type {string} */ token) => { setMade(token); reload(); }} />`;
}

/** @param {{onMade: (token: string) => void}} props */
function NewToken({ onMade }) {
  const [name, setName] = useState("");
  const [owner, setOwner] = useState("");
  const [isAdmin, setAdmin] = useState(false);
  const { run, error, isBusy } = useAction();
  /** @param {Event} event */
  const submit = (event) => {
    event.preventDefault();
    run(async () => {
      const made = await api("tokens", { name, owner: owner || name, rights: isAdmin ? ["admin", "use"] : ["use"] });
      setName("");
      setOwner("");
      onMade(made.token);
    });
  };
  return html`<form class="fields" onSubmit=${submit} aria-label="New token">
    <label>Name<input type="text" required value=${name} autocomplete="off" onInput=${(/** @type {any} */ event) => setName(event.target.value)} /></label>
    <label>Owner<input type="text" value=${owner} autocomplete="off" placeholder=${name || "the same"}
      onInput=${(/** @type {any} */ event) => setOwner(event.target.value)} /></label>
    <label>May<select value=${isAdmin ? "admin" : "use"} onChange=${(/** @type {any} */ event) => setAdmin(event.target.value === "admin")}>
      <option value="use">use the agent</option><option value="admin">use it and operate the server</option></select></label>
    <button type="submit" class="primary" disabled=${isBusy}>Make a token</button>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </form>`;
}
