/** Syntax highlighting: comments, strings, numbers and keywords, which most languages write alike. */

const WORDS = new Set((
  "abstract and as assert async await break case catch class const continue def default defer del delete do elif else end enum except " +
  "export extends extern false final finally fn for foreach from func function go goto if impl implements import in include instanceof " +
  "interface is lambda let local loop match mod module mut namespace new nil none nonlocal not null of or package pass private protected " +
  "pub public raise return select self static struct super switch template then this throw trait true try type typedef typeof undefined " +
  "union unless unsafe until use using var virtual void when where while with yield begin create drop insert into update values set table " +
  "order by group join left right on limit echo done fi esac"
).split(" "));
const HASH = new Set(["python", "py", "sh", "bash", "shell", "zsh", "ruby", "rb", "yaml", "yml", "toml", "perl", "r", "make", "makefile", "dockerfile", "conf", "ini", "elixir"]);
const DASHES = new Set(["sql", "lua", "haskell", "hs", "ada", "elm"]);
const PLAIN = new Set(["text", "txt", "markdown", "md", "output", "console", ""]);
const LONGEST = 50_000; // only this many characters are highlighted

/**
 * Split a text into parts, each with its kind; "" for plain text.
 * @param {string} text
 * @param {string} language
 * @returns {[string, string][]}
 */
export function parts(text, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || text.length > LONGEST) return [["", text]];
  if (name === "diff" || name === "patch") {
    return text.split(/(?<=\n)/).map((line) => [line.startsWith("+") ? "plus" : line.startsWith("-") ? "minus" : "", line]);
  }
  const comment = HASH.has(name) ? "#[^\\n]*" : DASHES.has(name) ? "--[^\\n]*" : "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
  const pattern = new RegExp(
    `(?<comment>${comment})|(?<text>"""[^]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?|\`(?:\\\\.|[^\`\\\\])*\`?)` +
      "|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_$][\\w$]*)",
    "g",
  );
  /** @type {[string, string][]} */
  const found = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    const groups = match.groups ?? {};
    const kind = groups.comment !== undefined ? "comment" : groups.text !== undefined ? "text" : groups.number !== undefined ? "number"
      : WORDS.has(match[0].toLowerCase()) ? "keyword" : "";
    if (!kind) continue;
    if (match.index > end) found.push(["", text.slice(end, match.index)]);
    found.push([kind, match[0]]);
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(["", text.slice(end)]);
  return found;
}
