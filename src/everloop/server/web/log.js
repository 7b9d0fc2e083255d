/** The log of requests: the latest turns of all sessions, each with its timeline. */
import { html, classes } from "./lib.js";
import { titleOf } from "./sidebar.js";
import { Waiting, sessionHash, span, timelineHash, useLoad, when } from "./views.js";

const EVERY = 5000;

/** @typedef {{id: string, session: string, started_at: number, ended_at: number | null, reason: string | null, title: string, parked: boolean}} Turn */

export function View() {
  const { data, error } = useLoad("turns", EVERY);
  const turns = /** @type {Turn[]} */ (data?.turns ?? []);
  return html`<div class="view">
    <p class="lead">The latest requests from the page, the terminal, chats, programs and jobs.</p>
    <${Waiting} data=${data} error=${error} />
    ${data && !turns.length && html`<p class="hint">Nothing was asked yet.</p>`}
    ${turns.length > 0 && html`<div class="scroll"><table class="data"><caption class="hidden">Requests</caption>
      <thead><tr><th scope="col">Request</th><th scope="col" class="clipped">Session</th><th scope="col">Began</th>
        <th scope="col" class="number">Took</th><th scope="col">Ended</th></tr></thead>
      <tbody>${turns.map((turn) => html`<${Row} key=${turn.id} turn=${turn} />`)}</tbody></table></div>`}
  </div>`;
}

/** @param {{turn: Turn}} props */
function Row({ turn }) {
  const isBad = turn.reason !== null && turn.reason !== "answer" && turn.reason !== "handed";
  const kind = turn.parked ? "is-warn" : turn.reason === null ? "is-good" : isBad && "is-bad";
  return html`<tr>
    <td><a href=${timelineHash(turn.session, turn.id)} dir="auto">${turn.title || "(no words)"}</a></td>
    <td class="clipped"><a href=${sessionHash(turn.session)} dir="auto">${titleOf(turn.session)}</a></td>
    <td class="time">${when(turn.started_at)}</td>
    <td class="number">${turn.ended_at === null ? "" : span(turn.ended_at - turn.started_at)}</td>
    <td><span class=${classes("badge", kind)}>${turn.reason ?? (turn.parked ? "waits for approval" : "open")}</span></td></tr>`;
}
