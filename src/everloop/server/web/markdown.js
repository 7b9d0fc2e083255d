/**
 * Markdown as nodes. Nothing is ever set as HTML: HTML in the text is shown as text, links only lead to allowed addresses,
 * and images are named instead of loaded.
 */
import { h, revealed, useEffect, useState } from "./lib.js";
import { lexer } from "./vendor/marked.js";
import * as smd from "./vendor/streaming-markdown.js";

const ALLOWED = /^(https?:|mailto:)/i;
const LONG = 100_000; // characters; the rest of a longer text is not parsed

/**
 * Return the address if links to it are allowed.
 * @param {string} href
 */
export function safeUrl(href) {
  const trimmed = String(href).replace(/[\u0000-\u0020\u007f-\u009f]/g, "");
  return ALLOWED.test(trimmed) ? trimmed : null;
}

/** @type {WeakMap<object, any>} */
const rendered = new WeakMap();

/**
 * Return the nodes of a text, built once per `owner`.
 * @param {object} owner
 * @param {string} text
 */
export function markdownOf(owner, text) {
  let node = rendered.get(owner);
  if (node === undefined) {
    node = h("div", { class: "markdown", dir: "auto" }, markdown(text));
    rendered.set(owner, node);
  }
  return node;
}

let level = 2; // of the last heading; the next one is at most one level deeper, whatever the text says

/** @param {string} text */
export function markdown(text) {
  level = 2; // h1 and h2 are the page's own headings
  const blocks = lexer(text.slice(0, LONG), { gfm: true, breaks: false }).map(blockNode);
  return text.length > LONG ? [...blocks, h("pre", null, text.slice(LONG))] : blocks;
}

/** @param {any} token */
function blockNode(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      level = Math.min(token.depth + 2, level + 1, 6);
      return h(`h${level}`, null, inline(token.tokens));
    case "paragraph":
      return h("p", null, inline(token.tokens));
    case "text":
      return token.tokens ? h("span", null, inline(token.tokens)) : decoded(token.text);
    case "code":
      return h(CodeBlock, { text: token.text, language: (token.lang ?? "").split(/\s/)[0] });
    case "blockquote":
      return h("blockquote", null, token.tokens.map(blockNode));
    case "list":
      return h(
        token.ordered ? "ol" : "ul",
        token.ordered && token.start !== 1 ? { start: token.start } : null,
        token.items.map(listItem),
      );
    case "table":
      return h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", null, [
        h("thead", null, h("tr", null, token.header.map((/** @type {any} */ cell) => cellNode("th", cell)))),
        h("tbody", null, token.rows.map((/** @type {any[]} */ row) =>
          h("tr", null, row.map((cell) => cellNode("td", cell))))),
      ]));
    case "hr":
      return h("hr", null);
    default:
      return h("p", null, token.raw); // HTML, and tokens of later versions of the parser
  }
}

/**
 * @param {string} name
 * @param {any} cell
 */
const cellNode = (name, cell) => h(name, cell.align ? { class: `to-${cell.align}` } : null, inline(cell.tokens));

/** @param {any} item */
function listItem(item) {
  const box = item.task ? h("input", { type: "checkbox", checked: item.checked, disabled: true, "aria-label": "done" }) : null;
  const tokens = item.tokens.filter((/** @type {any} */ token) => token.type !== "checkbox");
  return h("li", item.task ? { class: "task" } : null, box, tokens.map(blockNode));
}

/** @param {any[]} tokens */
function inline(tokens) {
  return tokens.map(inlineNode);
}

/**
 * @param {any} token
 * @returns {any}
 */
function inlineNode(token) {
  switch (token.type) {
    case "text":
      return token.tokens ? inline(token.tokens) : decoded(token.text);
    case "escape":
      return closed(token.text);
    case "strong":
      return h("strong", null, inline(token.tokens));
    case "em":
      return h("em", null, inline(token.tokens));
    case "del":
      return h("del", null, inline(token.tokens));
    case "codespan":
      return h("code", null, revealed(token.text));
    case "br":
      return h("br", null);
    case "link":
      return link(token.href, inline(token.tokens));
    case "image":
      return link(token.href, [`[image: ${closed(token.text || token.href)}]`]);
    default:
      return closed(token.raw);
  }
}

/**
 * @param {string} href
 * @param {any} children
 */
function link(href, children) {
  const url = safeUrl(href);
  if (url === null) return h("span", { class: "unsafe-link", title: "This address is not opened from here" }, children);
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, children);
}

const ENTITIES = new Map([["amp", "&"], ["lt", "<"], ["gt", ">"], ["quot", '"'], ["#39", "'"], ["nbsp", "\u00a0"]]);

/**
 * Decode the entities in a text of Markdown.
 * @param {string} text
 */
function decoded(text) {
  return closed(text).replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (whole, name) => ENTITIES.get(name) ?? whole);
}

/**
 * Close the embeddings, overrides and isolates that a text leaves open, and leave out ends without a beginning: they would
 * change the order of the text around it, even across elements that isolate theirs.
 * @param {string} text
 */
function closed(text) {
  if (!/[\u202a-\u202e\u2066-\u2069]/.test(text)) return text;
  const ends = /** @type {string[]} */ ([]); // of what is open
  let told = "";
  for (const one of text) {
    if (/[\u202a\u202b\u202d\u202e]/.test(one)) ends.push("\u202c");
    else if (/[\u2066-\u2068]/.test(one)) ends.push("\u2069");
    else if (one === "\u202c") {
      if (ends[ends.length - 1] !== one) continue;
      ends.pop();
    } else if (one === "\u2069") {
      if (!ends.includes(one)) continue;
      while (ends.pop() !== one); // the end of an isolate ends what was opened in it
    }
    told += one;
  }
  return told + ends.reverse().join("");
}

/** @type {((text: string, language: string) => [string, string][]) | null} */
let parts = null; // the highlighter, once its module is loaded

/** @param {{text: string, language: string}} props */
export function CodeBlock({ text, language }) {
  const [, setReady] = useState(parts !== null);
  useEffect(() => {
    if (parts || !language) return;
    import("./highlight.js").then((module) => {
      parts = module.parts;
      setReady(true);
    }, () => undefined);
  }, []);
  const shown = revealed(text);
  return h("figure", { class: "code" }, [
    h("figcaption", null, [h("span", null, language || "text"), h(CopyButton, { text })]),
    h("pre", { tabindex: 0, dir: "ltr" }, h("code", null, parts ? parts(shown, language).map(([kind, part]) => (kind ? h("span", { class: `code-${kind}` }, part) : part)) : shown)),
  ]);
}

/** @param {{text: string, label?: string}} props */
export function CopyButton({ text, label }) {
  /** @param {MouseEvent} event */
  const copy = async (event) => {
    const button = /** @type {HTMLButtonElement} */ (event.currentTarget);
    await navigator.clipboard?.writeText(text);
    /** @param {string} words @param {string | null} name */
    const say = (words, name) => {
      button.textContent = words;
      if (label) button.ariaLabel = name;
    };
    say("Copied", "Copied");
    setTimeout(() => say("Copy", label ?? null), 1500);
  };
  return h("button", { class: "quiet small", type: "button", "aria-label": label, onClick: copy }, "Copy");
}

// ---------------------------------------------------------------------------------------------- streaming

const DOCUMENT = 1;
const TAGS = new Map([
  [smd.PARAGRAPH, "p"], [smd.HEADING_1, "h3"], [smd.HEADING_2, "h3"], [smd.HEADING_3, "h3"], [smd.HEADING_4, "h3"],
  [smd.HEADING_5, "h3"], [smd.HEADING_6, "h3"], [smd.CODE_INLINE, "code"], [smd.ITALIC_AST, "em"], [smd.ITALIC_UND, "em"],
  [smd.STRONG_AST, "strong"], [smd.STRONG_UND, "strong"], [smd.STRIKE, "del"], [smd.LINK, "a"], [smd.RAW_URL, "a"],
  [smd.IMAGE, "span"], [smd.BLOCKQUOTE, "blockquote"], [smd.LINE_BREAK, "br"], [smd.RULE, "hr"], [smd.LIST_UNORDERED, "ul"],
  [smd.LIST_ORDERED, "ol"], [smd.LIST_ITEM, "li"], [smd.TABLE, "table"], [smd.TABLE_ROW, "tr"], [smd.TABLE_CELL, "td"],
]);

/**
 * Return a Markdown writer that appends to an element. Each piece costs only as much as it is long.
 * @param {HTMLElement} root
 */
export function liveMarkdown(root) {
  root.replaceChildren();
  const parser = smd.parser({
    data: { nodes: [/** @type {HTMLElement} */ (root)] },
    add_token(data, type) {
      if (type === DOCUMENT) return;
      const parent = data.nodes[data.nodes.length - 1];
      const isCode = type === smd.CODE_BLOCK || type === smd.CODE_FENCE;
      const node = document.createElement(isCode ? "pre" : TAGS.get(type) ?? "span");
      parent.append(node);
      data.nodes.push(node);
    },
    end_token(data) {
      if (data.nodes.length > 1) data.nodes.pop();
    },
    add_text(data, text) {
      const node = data.nodes[data.nodes.length - 1];
      const shown = node.closest("pre, code") ? revealed(text) : text;
      if (node.lastChild instanceof Text) node.lastChild.appendData(shown);
      else node.append(shown);
    },
    set_attr(data, type, value) {
      const node = data.nodes[data.nodes.length - 1];
      const url = type === smd.HREF ? safeUrl(value) : null;
      if (url === null || !(node instanceof HTMLAnchorElement)) return;
      node.href = url;
      node.target = "_blank";
      node.rel = "noopener noreferrer";
    },
  });
  return (/** @type {string} */ piece) => smd.parser_write(parser, piece);
}
