/** Chat networks: their states, the people waiting to be paired, and messages that could not be delivered. */
import { html, useState } from "./lib.js";
import { api } from "./api.js";
import { canPush, isWanted, subscribe, unsubscribe } from "./push.js";
import { Waiting, useAction, useLoad, when } from "./views.js";

const EVERY = 5000;

/** @typedef {{id: number, at: number, chat: string, reason: string, text: string}} Dead */

export function View() {
  const { data, error, reload } = useLoad("channels", EVERY);
  const channels = /** @type {any[]} */ (data?.channels ?? []);
  return html`<div class="view">
    <p class="lead">The chat networks in which your agent answers.</p>
    <${Notifications} />
    <${Waiting} data=${data} error=${error} />
    ${data && !channels.length && html`<p class="hint">No chat network is connected yet. <code>everloop init</code>, on the server, connects one.</p>`}
    ${channels.some(hasPeople) && html`<${Pairing} isOperator=${data.operator} onDone=${reload} />`}
    ${channels.length > 0 && html`
      <ul class="cards" aria-label="Channels">${channels.map((one) => html`<${Channel} key=${one.name} channel=${one} onDone=${reload} />`)}</ul>`}
  </div>`;
}

/** Notifications in this browser. Only a click asks for the permission. */
function Notifications() {
  const { data, error, reload } = useLoad("push");
  const [isOn, setOn] = useState(isWanted());
  const action = useAction(reload);
  if (!data) return error ? html`<p class="notice is-error" role="alert">${error}</p>` : null;
  const change = () => action.run(async () => {
    await (isOn ? unsubscribe() : subscribe());
    setOn(isWanted());
  });
  return html`<section class="card" aria-label="Notifications">
    <p class="top"><span>Notifications in this browser</span> <span class=${`badge ${isOn ? "is-good" : ""}`}>${isOn ? "on" : "off"}</span></p>
    <p class="hint">When a question waits or a turn has ended, and no page of yours is open before you. ${data.content ? "They show the beginning of what was said." : "They name the session, and nothing that was said."}</p>
    ${!data.enabled && html`<p class="hint">This server sends none: its settings have no <code>[channels.push]</code>.</p>`}
    ${data.enabled && !canPush() && html`<p class="hint">This browser has none, or not for this address: they need this machine or https.</p>`}
    ${data.enabled && canPush() && html`<p class="row"><button type="button" class="small" disabled=${action.isBusy} onClick=${change}>${isOn ? "Turn off" : "Turn on"}</button></p>`}
    ${action.error && html`<p class="is-error" role="alert">${action.error}</p>`}
  </section>`;
}

/** Return whether people can write to a channel. @param {any} channel */
const hasPeople = (channel) => channel.network !== "push";

/** @param {any} channel */
function stateOf(channel) {
  if (channel.error) return ["is-bad", "not working"];
  if (!channel.running) return ["is-warn", "not running"];
  return channel.at === null ? ["is-warn", "connecting"] : ["is-good", "connected"];
}

/** @param {{channel: any, onDone: () => void}} props */
function Channel({ channel, onDone }) {
  const { run, error, isBusy } = useAction(onDone);
  const dead = /** @type {Dead[]} */ (channel.dead);
  const [kind, words] = stateOf(channel);
  /** @param {number[]} ids */
  const resend = (ids) => run(() => api(`channels/${encodeURIComponent(channel.name)}/resend`, { ids }));
  /** @param {string} code */
  const pair = (code) => run(() => api("channels/pair", { code }));
  return html`<li class="card">
    <p class="top"><span>${channel.name}</span> <span class=${`badge ${kind}`}>${words}</span></p>
    <dl class="facts">
      ${channel.network !== channel.name && html`<div><dt>Network</dt><dd>${channel.network}</dd></div>`}
      ${hasPeople(channel) && html`<div><dt>Owner</dt><dd dir="auto">${channel.owner}</dd></div>
        <div><dt>Paired</dt><dd dir="auto">${channel.paired.join(", ") || "nobody"}</dd></div>`}
      ${channel.at !== null && html`<div><dt>Since</dt><dd>${when(channel.at)}</dd></div>`}
    </dl>
    ${channel.error && html`<p class="notice is-error" dir="auto">${channel.error}</p>`}
    ${!channel.running && html`<p class="hint">No process runs it: <code>everloop serve</code> does.</p>`}
    ${channel.pending.length > 0 && html`<h2>Waiting to be paired</h2>
      <ul class="rows" aria-label="Waiting to be paired">${channel.pending.map((/** @type {any} */ one) => html`<li key=${one.code} class="row">
        <span class="grow" dir="auto">${one.name || one.sender} · ${when(one.at)}</span>
        <button type="button" class="small" disabled=${isBusy} aria-label=${`Pair, code ${one.code}, ${one.name || one.sender}`}
          onClick=${() => pair(one.code)}>Pair, code <code>${one.code}</code></button></li>`)}</ul>
      <p class="hint">Compare the code with the one that the person was given: names can be chosen freely.</p>`}
    ${dead.length > 0 && html`<h2>Not delivered</h2>
      <ul class="rows" aria-label="Not delivered">${dead.map((one) => html`<li key=${one.id}>
        <p class="row"><span class="grow" dir="auto">${one.text || "(empty)"}</span>
          <button type="button" class="small" disabled=${isBusy} aria-label=${`Send again: message ${one.id}`} onClick=${() => resend([one.id])}>Send again</button></p>
        <p class="meta" dir="auto">to ${one.chat}, ${when(one.at)}: ${one.reason}</p></li>`)}</ul>
      ${dead.length > 1 && html`<p class="row"><button type="button" class="small" disabled=${isBusy}
        onClick=${() => resend(dead.map((one) => one.id))}>Send all ${dead.length} again</button></p>`}`}
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
  </li>`;
}

/** Confirm a pairing code that a person has passed on. @param {{isOperator: boolean, onDone: () => void}} props */
function Pairing({ isOperator, onDone }) {
  const [code, setCode] = useState("");
  const [isAdmin, setAdmin] = useState(false);
  const [said, setSaid] = useState("");
  const { run, error, isBusy } = useAction(onDone);
  /** @param {Event} event */
  const submit = (event) => {
    event.preventDefault();
    setSaid("");
    run(async () => {
      setSaid((await api("channels/pair", { code, admin: isAdmin })).said);
      setCode("");
    });
  };
  return html`<form class="fields" onSubmit=${submit} aria-label="Pair a person">
    <label>Pairing code<input type="text" required value=${code} autocomplete="off" spellcheck="false" maxlength="20"
      onInput=${(/** @type {any} */ event) => setCode(event.target.value)} /></label>
    ${isOperator && html`<label>May<select value=${isAdmin ? "admin" : ""} onChange=${(/** @type {any} */ event) => setAdmin(event.target.value === "admin")}>
      <option value="">talk to the agent</option><option value="admin">talk to it and pair others</option></select></label>`}
    <button type="submit" class="primary" disabled=${isBusy}>Pair</button>
    ${error && html`<p class="is-error" role="alert">${error}</p>`}
    ${said && html`<p role="status" dir="auto">${said}</p>`}
  </form>`;
}
