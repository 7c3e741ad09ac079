// What is shown of a turn: its text, why it ended, figures, what may be done.

import {amount, copy, el, patch, short, visible} from './dom.js';
import {Markdown} from './markdown.js';
import {branches, withFiles} from './talk.js';

function fold(kind, title, ...content) {
  return el('details', {className: kind}, el('summary', {}, ...title), ...content);
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

const button = (textContent, onclick, props) => el('button', {textContent, onclick, ...props});

// `acts` is what the page does with a turn: `chat`, `meta` of the model, `again`, `edit`, `pick`.
class View {
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.body = el('div', {className: 'body'});
    this.canvas = el('span', {className: 'canvas', ariaHidden: true});
    this.note = el('div', {className: 'note quiet'});
    this.foot = el('div', {className: 'foot'});
    this.node = el('article', {className: `turn ${turn.role}`}, this.body, this.note, this.foot);
    this.copy = button('Copy', () => copy(this.copy, visible(this.source())), {className: 'copy'});
    this.again = button('Regenerate', () => acts.again(this.turn), {className: 'again'});
    this.change = button('Edit', () => this.edit(), {className: 'change'});
    this.branch = el('span', {className: 'branch'});
    this.figures = el('p', {className: 'figures quiet'});
  }

  end() {
    this.unsure = null;
    this.paint();
    this.showFoot();
  }

  // What a diffusion model may still change stands behind the text.
  showCanvas(tail) {
    this.canvas.remove();
    if (!this.unsure) return;
    this.canvas.replaceChildren(...this.unsure.map((text) => (text === null ? el('i') : visible(text))));
    (tail ?? this.body).append(this.canvas);
  }

  showFoot() {
    const {tokens, rate, run, note, fault} = this.turn;
    const {bytes_per_token: bytes, read_gbps: gbps} = this.acts.meta;
    const parts = [];
    if (tokens) parts.push(tokens === 1 ? '1 token' : `${tokens.toLocaleString()} tokens`);
    if (rate) parts.push(`${short(rate)} tok/s`);
    if (run > 1.05) parts.push(`${short(run)} a pass`);
    if (rate && bytes && gbps && this.writes) {
      const passes = rate / (run || 1), share = Math.round(passes * bytes / gbps / 1e7);
      parts.push(`${share} % of bandwidth${share > 100 ? ': from caches' : ''}`);
      this.figures.title = `${short(passes)} forwards a second × ${amount(bytes)} of weights a token ÷ ${short(gbps)} GB/s`;
    }
    this.figures.textContent = parts.join(' · ');
    this.again.textContent = fault ? 'Try again' : 'Regenerate';
    this.showBranch();
    this.copy.hidden = !this.source();
    const isAnswer = this.turn.role === 'assistant';
    this.foot.replaceChildren(this.branch, this.copy, ...isAnswer ? [this.again] : [], this.change, ...isAnswer ? [this.figures] : []);
    this.note.replaceChildren();
    if (fault) this.note.append(el('div', {className: 'fault'}, ...fault.map((text) => el('p', {}, text))));
    else if (note) this.note.append(el('p', {}, note));
  }

  showBranch() {
    const all = branches(this.acts.chat, this.turn);
    const at = all.indexOf(this.turn);
    const step = (by, title, textContent) => button(textContent, () => this.acts.pick(all[at + by]), {title, ariaLabel: title, disabled: !all[at + by]});
    this.branch.replaceChildren();
    if (all.length > 1) this.branch.append(step(-1, 'Previous branch', '‹'), `${at + 1} / ${all.length}`, step(1, 'Next branch', '›'));
  }

  // Enter ends the edit of a question, Ctrl+Enter that of an answer, Escape leaves it.
  edit() {
    if (this.acts.isBusy()) return;
    const asks = this.turn.role !== 'assistant';
    const area = el('textarea', {value: this.text(), ariaLabel: 'Edit this turn'});
    const leave = () => {
      box.remove();
      this.node.classList.remove('edited');
      this.change.focus();
    };
    const done = () => {
      leave();
      if (area.value !== this.text()) this.acts.edit(this.turn, area.value);
    };
    const grow = () => {
      area.style.height = 'auto';
      area.style.height = `${area.scrollHeight + 2}px`;
    };
    area.oninput = grow;
    area.onkeydown = (event) => {
      if (event.key === 'Escape') leave();
      else if (event.key !== 'Enter' || event.shiftKey || event.isComposing || !(asks || event.ctrlKey || event.metaKey)) return;
      else done();
      event.preventDefault();
      event.stopPropagation();
    };
    const end = el('div', {className: 'end'}, button('Cancel', leave), button(asks ? 'Send' : 'Save', done, {className: 'main', title: asks ? 'Enter' : 'Ctrl+Enter'}));
    const box = el('div', {className: 'edit'}, area, end);
    this.node.classList.add('edited');
    this.node.append(box);
    grow();
    area.focus();
  }

  text() {
    return this.turn.content;
  }

  source() {
    return this.turn.content;
  }
}

export class AskedView extends View {
  constructor(turn, acts) {
    super(turn, acts);
    const text = el('div', {className: 'said', dir: 'auto'}, visible(turn.content));
    for (const file of turn.files ?? []) {
      const size = el('small', {}, ` ${amount(new Blob([file.text]).size)}`);
      this.body.append(fold('file', [el('bdi', {}, visible(file.name)), size], el('pre', {tabIndex: 0}, visible(file.text))));
    }
    if (turn.role === 'tool') this.body.append(fold('result', ['Result of ', el('b', {}, el('bdi', {}, visible(turn.name)))], text));
    else if (turn.content) this.body.append(text);
    this.showFoot();
  }

  paint() {}

  source() {
    return withFiles(this.turn);
  }
}

export class AnswerView extends View {
  constructor(turn, acts) {
    super(turn, acts);
    this.writes = true;
    this.calls = [];
    this.end();
  }

  paint() {
    const {reasoning, content, calls, thought_s: seconds} = this.turn;
    if (reasoning) {
      if (!this.thought) {
        this.thought = new Markdown(el('div', {className: 'thinking quiet'}));
        this.summary = el('span');
        this.body.prepend(fold('thought', [this.summary], this.thought.root));
      }
      const isOver = content || calls.length || this.turn.finish;
      const thought = seconds === undefined ? 'Thoughts' : `Thought for ${short(seconds)} s`;
      this.summary.textContent = isOver ? thought : 'Thinking';
      this.thought.update(reasoning);
    }
    if (content) {
      this.shown ??= new Markdown(this.body.appendChild(el('div', {className: 'text'})));
      this.canvas.remove();
      this.shown.update(content);
    }
    this.showCanvas(this.shown?.tail);
    calls.forEach((call, at) => {
      if (!this.calls[at]) {
        const title = ['Calls ', el('b', {}, el('bdi', {}, visible(call.name)))];
        this.calls[at] = el('code');
        this.body.append(fold('call', title, el('pre', {tabIndex: 0, dir: 'ltr'}, this.calls[at])));
      }
      patch(this.calls[at], el('code', {}, visible(this.turn.finish ? indented(call.arguments) : call.arguments)));
    });
  }

  // A call that waits for its result is open.
  unfold(isOpen) {
    for (const call of this.calls) call.closest('details').open = isOpen;
  }
}

// A text that the model completes: the given part beside the generated one.
export class TextView extends View {
  constructor(turns, acts) {
    super(turns.at(-1), acts);
    this.turns = turns;
    this.writes = true;
    this.body.classList.add('document');
    this.body.dir = 'auto';
    this.body.append(...turns.map(({role, content}) => el('span', {className: role === 'user' ? 'given' : 'made'}, visible(content))));
    this.end();
  }

  paint() {
    this.canvas.remove();
    patch(this.body.lastChild, el('span', {}, visible(this.turn.content)));
    this.showCanvas();
  }

  source() {
    return this.turns.map((turn) => turn.content).join('');
  }

  text() {
    return this.source();
  }
}
