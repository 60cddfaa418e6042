// Text of models as formatted blocks, while it streams. marked reads the markdown, DOMPurify lets only the tags below
// through, highlight.js colours code. HTML that a model writes is shown as text. Without the libraries, which the build
// adds, everything is plain text.

const TAGS = "a blockquote br code del em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".split(" ");
const RULES = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const MAX_CHARS = 200_000; // a longer answer is shown as plain text
const MAX_CODE_CHARS = 30_000; // a longer block is not coloured

/** The three libraries, or null if the build left them out. */
export async function loadLibraries() {
  if (document.documentElement.dataset.libraries !== "yes") return null;
  const names = ["marked", "purify", "highlight"];
  const [reader, purify, highlight] = await Promise.all(names.map((name) => import(`./vendor/${name}.js`)));
  return { marked: makeReader(reader.Marked), purify: purify.default, highlight: highlight.default };
}

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function makeReader(Marked) {
  const reader = new Marked({ gfm: true });
  reader.use({
    renderer: {
      html: (token) => escaped(token.text),
      image: (token) => escaped(token.raw), // loading it would tell another server of this conversation
      checkbox: (token) => (token.checked ? "☑ " : "☐ "),
      heading(token) {
        const level = Math.min(6, token.depth + 2); // below the headings of the page
        return `<h${level}>${this.parser.parseInline(token.tokens)}</h${level}>`;
      },
    },
  });
  return reader;
}

/** One message's text in `box`: of a longer text only the blocks that changed are made anew. */
export class MarkdownView {
  #box;
  #libraries;
  #shown = []; // {raw, node, code} for each block

  constructor(box, libraries) {
    this.#box = box;
    this.#libraries = libraries;
  }

  update(text, isFinal) {
    if (!this.#libraries || text.length > MAX_CHARS) return this.#plain(text);
    try {
      this.#blocks(text, isFinal);
    } catch (error) { // markdown nested too deeply for the reader
      console.warn("shown as plain text:", error);
      this.#plain(text);
    }
  }

  #plain(text) {
    this.#shown = [];
    this.#box.classList.add("plain");
    this.#box.textContent = text;
  }

  #blocks(text, isFinal) {
    const all = this.#libraries.marked.lexer(text);
    const tokens = all.filter((token) => !["space", "def"].includes(token.type));
    if (isFinal && all.some((token) => token.type === "def")) this.#shown = []; // blocks before it may refer to it
    if (!this.#shown.length) this.#box.replaceChildren();
    let same = 0;
    while (same < this.#shown.length && same < tokens.length && this.#shown[same].raw === tokens[same].raw) same += 1;
    if (same === this.#shown.length - 1 && this.#grow(tokens[same])) same += 1;
    for (const block of this.#shown.splice(same)) block.node.remove();
    for (const token of tokens.slice(same)) {
      const block = this.#make(token);
      this.#shown.push(block);
      this.#box.append(block.node);
    }
    const settled = isFinal ? this.#shown : this.#shown.slice(0, -1);
    for (const block of settled) this.#colour(block);
  }

  /** A code block that is being written keeps its place and its button; only its text grows. */
  #grow(token) {
    const last = this.#shown[this.#shown.length - 1];
    if (!token || token.type !== "code" || last.type !== "code" || last.isColoured) return false;
    if (last.language !== languageOf(token)) return false;
    last.raw = token.raw;
    last.codes[0].textContent = `${token.text}\n`; // as marked writes it
    return true;
  }

  #make(token) {
    const node = document.createElement("div");
    node.append(this.#libraries.purify.sanitize(this.#libraries.marked.parser([token]), RULES));
    for (const link of node.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    for (const table of node.querySelectorAll("table")) wrap(table, "table", "Table");
    const codes = [...node.querySelectorAll("pre > code")];
    for (const code of codes) frame(code);
    return { raw: token.raw, type: token.type, language: languageOf(token), node, codes, isColoured: false };
  }

  #colour(block) {
    if (block.isColoured) return;
    block.isColoured = true;
    const { highlight, purify } = this.#libraries;
    for (const code of block.codes) {
      const language = nameOf(code);
      if (!highlight.getLanguage(language) || code.textContent.length > MAX_CODE_CHARS) continue;
      const coloured = highlight.highlight(code.textContent, { language, ignoreIllegals: true }).value;
      code.replaceChildren(purify.sanitize(coloured, RULES));
    }
  }
}

function languageOf(token) {
  return token.type === "code" ? (token.lang || "").split(/\s/)[0] : "";
}

function nameOf(code) {
  return (code.className.match(/language-(\S+)/) || ["", ""])[1];
}

function wrap(node, className, name) {
  const box = document.createElement("div");
  box.className = className;
  node.replaceWith(box);
  box.append(node);
  reachable(box, name);
  return box;
}

/** What scrolls sideways has to be reached by keyboard. */
function reachable(node, name) {
  node.tabIndex = 0;
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", name);
}

/** A block of code below a line with its language and a button that copies it. */
function frame(code) {
  const pre = code.parentElement;
  const head = document.createElement("div");
  head.className = "code-head";
  const language = document.createElement("span");
  language.textContent = nameOf(code) || "code";
  head.append(language, copyButton("Copy code", () => code.textContent));
  const box = document.createElement("div");
  box.className = "code";
  pre.replaceWith(box);
  box.append(head, pre);
  reachable(pre, `Code${nameOf(code) ? ` in ${nameOf(code)}` : ""}`);
}

/** A button that copies text() and says whether that went well. */
export function copyButton(name, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "The browser does not allow it";
    setTimeout(() => { button.textContent = name; }, 2000);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // pages over plain http of another machine have no clipboard
  }
}

function copyBySelection(text) {
  const field = document.createElement("textarea");
  const focused = document.activeElement;
  field.value = text;
  field.className = "hidden";
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  if (focused) focused.focus();
  return isCopied;
}
