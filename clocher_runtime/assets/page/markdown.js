// Markdown as elements. The parser's tokens become elements here, one by one, from the lists
// below: no text of a model is ever parsed as HTML, by the parser or by the browser.

import {el, patch, visible} from './dom.js';

const {markdownit, temml, hljs} = globalThis;
const MAX_HIGHLIGHTED = 20000; // characters; longer code stays plain
const MAX_MATH = 2000;

const md = markdownit({html: false, linkify: true, breaks: true, maxNesting: 40});
md.disable(['code', 'lheading', 'reference']); // these change what was already written
md.validateLink = (address) => /^https?:\/\//i.test(address) && URL.canParse(address);
md.linkify.set({fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false});

// 2*3*4 is a product.
const {scanDelims} = md.inline.State.prototype;
md.inline.State.prototype.scanDelims = function scan(start, canSplitWord) {
  return scanDelims.call(this, start, canSplitWord && !/^\w\*\w/.test(this.src.slice(start - 1, start + 2)));
};

// Math: $x$ without blanks inside its ends or a word behind it (prices and $NAMES stay text), $$x$$, \(x\), \[x\].
const MATH = /\$\$([^]{1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\]|\$(?![\s$])((?:\\[^]|[^\\$\n]){1,999}?)(?<!\s)\$(?!\w)|\\\(([^]{1,2000}?)\\\)/y;

md.inline.ruler.before('escape', 'math', (state, silent) => {
  if (!'$\\'.includes(state.src[state.pos])) return false;
  MATH.lastIndex = state.pos;
  const found = MATH.exec(state.src);
  if (!found) return false;
  if (!silent) state.push(found[1] ?? found[2] ? 'math_block' : 'math', '', 0).content = found.slice(1).find(Boolean);
  state.pos += found[0].length;
  return true;
});

// A formula on lines of its own, none of them empty; one that does not end yet goes to the end.
md.block.ruler.before('fence', 'math', (state, first, end, silent) => {
  const from = state.bMarks[first] + state.tShift[first];
  const close = {$$: '$$', '\\[': '\\]'}[state.src.slice(from, from + 2)];
  if (!close) return false;
  let text = state.src.slice(from + 2, state.eMarks[first]);
  let line = first + 1;
  for (; !text.includes(close) && line < end; line += 1) {
    if (state.isEmpty(line) || text.length > MAX_MATH) return false;
    text += `\n${state.getLines(line, line + 1, state.blkIndent, false)}`;
  }
  const [tex, rest = ''] = text.split(close);
  if (rest.trim()) return false;
  if (!silent) {
    state.line = line;
    const token = state.push('math_block', '', 0);
    token.content = tex;
    token.map = [first, line];
  }
  return true;
}, {alt: ['paragraph', 'blockquote', 'list']});

function math(tex, displayMode) {
  const box = el(displayMode ? 'div' : 'span', {className: 'math', tabIndex: displayMode ? 0 : -1});
  try {
    temml.render(visible(tex), box, {displayMode, throwOnError: true, maxExpand: 300, maxSize: [20, 200]});
  } catch { // not TeX, or not yet
    box.replaceChildren(el('code', {}, displayMode ? tex : `$${tex}$`));
  }
  for (const node of box.querySelectorAll('[id], [href]')) {
    node.removeAttribute('id'); // \label would name it like a part of the page
    node.removeAttribute('href');
  }
  return box;
}

// The tree of the highlighter, as elements.
function coloured(node) {
  if (typeof node === 'string') return node;
  const children = node.children.map(coloured);
  return node.scope ? el('span', {className: `hl-${node.scope.split('.')[0]}`}, ...children) : el('span', {}, ...children);
}

function codeBlock({info, content}) {
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  const code = el('code');
  if (content.length < MAX_HIGHLIGHTED && hljs.getLanguage(language)) {
    const {rootNode} = hljs.highlight(content, {language, ignoreIllegals: true})._emitter;
    code.append(...rootNode.children.map(coloured));
  } else {
    code.append(content);
  }
  const caption = el('figcaption', {}, el('span', {}, language), el('button', {className: 'copy', textContent: 'Copy'}));
  return el('figure', {}, caption, el('pre', {tabIndex: 0, dir: 'ltr'}, code));
}

// A link says where it leads.
function host(link) {
  const {host: name} = new URL(link.href);
  return link.textContent.includes(name) ? '' : el('small', {}, ` (${name})`);
}

const anchor = (href) => el('a', {href, target: '_blank', rel: 'noopener noreferrer'});

function image({attrs, content}) { // is not loaded
  const link = anchor(Object.fromEntries(attrs).src);
  link.append(`image: ${visible(content)}`);
  return el('span', {}, link, host(link));
}

const BOXES = {
  paragraph: 'p', blockquote: 'blockquote', bullet_list: 'ul', ordered_list: 'ol', list_item: 'li',
  thead: 'thead', tbody: 'tbody', tr: 'tr', th: 'th', td: 'td', em: 'em', strong: 'strong', s: 's',
};
const DIRECTED = /^(p|h\d|li|t[dh]|blockquote|[uo]l)$/;
const LEAVES = {
  text: ({content}) => visible(content),
  code_inline: ({content}) => el('code', {}, content),
  softbreak: () => el('br'),
  hardbreak: () => el('br'),
  hr: () => el('hr'),
  fence: codeBlock,
  image,
  math: ({content}) => math(content, false),
  math_block: ({content}) => math(content, true),
};

function box(token) {
  const attrs = Object.fromEntries(token.attrs ?? []);
  const type = token.type.slice(0, -'_open'.length);
  if (type === 'link') return anchor(attrs.href);
  if (type === 'heading') return el(`h${Math.min(Number(token.tag[1]) + 2, 6)}`);
  const node = el(BOXES[type]);
  if (attrs.start) node.start = attrs.start;
  if (attrs.style) node.style.textAlign = attrs.style.split(':')[1];
  return node;
}

// "[x] " before the text of an item.
function task(tokens, parent) {
  const found = /^\[([ xX])\] /.exec(tokens[0]?.content);
  if (!found || parent.closest('li')?.textContent) return;
  tokens[0].content = tokens[0].content.slice(found[0].length);
  const checked = found[1] !== ' ';
  parent.closest('li').classList.add('task');
  parent.append(el('input', {type: 'checkbox', disabled: true, checked, ariaLabel: checked ? 'done' : 'open'}));
}

function build(tokens, root) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === 'inline') {
      if (parent.closest?.('li')) task(token.children, parent);
      build(token.children, parent);
    } else if (token.nesting === 0) {
      parent.append(LEAVES[token.type](token));
    } else if (token.nesting < 0) {
      const node = open.pop();
      if (DIRECTED.test(token.tag)) node.dir = 'auto'; // once its text is there: each addition would look again
      if (token.type === 'link_close') parent.after(host(parent));
    } else if (token.hidden) {
      open.push(parent); // the paragraph of a tight list
    } else if (token.type === 'table_open') {
      open.push(el('table'));
      parent.append(el('div', {className: 'table', tabIndex: 0}, open.at(-1)));
    } else {
      open.push(box(token));
      parent.append(open.at(-1));
    }
  }
  return root;
}

// A text that grows: blocks before the last one are final, so only the last one is parsed again.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.done = 0; // characters of final blocks
  }

  update(text) {
    if (text === this.text) return;
    this.text = text;
    const rest = visible(text).slice(this.done);
    const tokens = md.parse(rest, {});
    const blocks = tokens.filter((token) => token.level === 0 && token.nesting >= 0);
    this.last ??= this.root.appendChild(el('div', {className: 'last'}));
    patch(this.last, build(tokens, el('div')));
    if (blocks.length < 2) return;
    let start = 0;
    for (let line = blocks.at(-1).map[0]; line > 0; line -= 1) start = rest.indexOf('\n', start) + 1;
    if (!rest.includes('\n', start)) return; // its first line may still change what it is
    while (this.last.childNodes.length > 1) this.last.before(this.last.firstChild);
    this.done += start;
  }

  get tail() {
    let node = this.last?.lastChild;
    while (/^(ul|ol|li|blockquote|figure|pre)$/.test(node?.localName) && node.lastElementChild) node = node.lastElementChild;
    return node ?? this.root;
  }
}
