/** Completion in the composer: commands after a slash, files after an at sign. */
import { api } from "./api.js";

/**
 * @typedef {{text: string, label: string, about: string}} Choice
 * @typedef {{from: number, choices: Choice[]}} Completion choices that replace the text from a position on
 */

const FILE = /(?:^|\s)@(?:"([^"\n]*)|([^\s"]*))$/;
const MOST = 8;

/** @type {Promise<{commands: {name: string, about: string}[]}> | null} */
let commands = null;

/**
 * Return the completion at the end of a text, or null.
 * @param {string} before the text before the cursor
 * @returns {Promise<Completion | null>}
 */
export async function complete(before) {
  const command = /^\/(\w*)$/.exec(before);
  if (command) {
    commands ??= api("commands");
    const known = (await commands).commands;
    const choices = known.filter((one) => one.name.startsWith(command[1].toLowerCase()));
    return { from: 0, choices: choices.map((one) => ({ text: `/${one.name}`, label: `/${one.name}`, about: one.about })) };
  }
  const file = FILE.exec(before);
  if (!file) return null;
  const { paths } = await api(`files/matching?q=${encodeURIComponent(file[1] ?? file[2])}`);
  const choices = paths.slice(0, MOST).map((/** @type {string} */ path) => ({ text: /\s/.test(path) ? `@"${path}" ` : `@${path} `, label: path, about: "" }));
  return { from: before.lastIndexOf("@"), choices };
}
