// A chat as data. Its turns are a tree: each has the id of its parent, ids grow, and `tip` is the
// end of the branch that is shown.

export const FIELDS = ['system', 'temperature', 'max_tokens', 'top_p', 'top_k', 'min_p', 'seed', 'tools'];
const FORMAT = 'clocher-chats';

const newId = () => [...crypto.getRandomValues(new Uint32Array(3))].map((word) => word.toString(36)).join('');

export function newChat(kind, settings) {
  const now = Date.now();
  return {id: newId(), title: '', kind, made: now, changed: now, settings: {...settings}, turns: [], tip: null};
}

export function path(chat) {
  const byId = new Map(chat.turns.map((turn) => [turn.id, turn]));
  const turns = [];
  for (let turn = byId.get(chat.tip); turn; turn = byId.get(turn.parent)) turns.push(turn);
  return turns.reverse();
}

export function add(chat, turn, parent = chat.tip) {
  const made = {...turn, id: (chat.turns.at(-1)?.id ?? 0) + 1, parent, at: Date.now()};
  chat.turns.push(made);
  chat.tip = made.id;
  return made;
}

export const branches = (chat, turn) => chat.turns.filter((each) => each.parent === turn.parent);

// Shows the newest branch that goes through a turn.
export function show(chat, turn) {
  for (let next = turn; next; next = chat.turns.findLast((each) => each.parent === chat.tip)) chat.tip = next.id;
}

export function drop(chat, turn) {
  chat.turns = chat.turns.filter((each) => each !== turn);
  chat.tip = turn.parent;
}

export function titleOf(chat) {
  const first = chat.turns.find((turn) => turn.role === 'user');
  const text = chat.title || first?.content.trim() || first?.files?.[0].name || 'New chat';
  const [line] = text.split('\n');
  return line.length > 80 ? `${line.slice(0, 79).trimEnd()}…` : line;
}

export const headOf = (chat) => ({id: chat.id, title: titleOf(chat), changed: chat.changed});

// What of a chat can be searched.
export const textOf = (chat) => chat.turns.map((turn) => turn.content).join('\n');

// A question with its files before it, each in a fence that it does not contain.
export function withFiles({content, files = []}) {
  const fenced = files.map(({name, text}) => {
    const ticks = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1;
    return `File ${name}:\n${'`'.repeat(ticks)}\n${text.replace(/\n$/, '')}\n${'`'.repeat(ticks)}\n`;
  });
  return [...fenced, content].join('\n');
}

// The call that waits for a result.
export function openCall(turns) {
  const at = turns.findLastIndex((turn) => turn.role === 'assistant');
  if (turns[at]?.finish !== 'tool_calls') return null;
  const told = turns.slice(at).map((turn) => turn.call);
  return turns[at].calls.find((call) => !told.includes(call.id));
}

export function messages(turns, system) {
  const told = system?.trim() ? [{role: 'system', content: system.trim()}] : [];
  for (const turn of turns) {
    const {role, content, reasoning, calls, finish} = turn;
    const called = role === 'assistant' && finish === 'tool_calls';
    if (role === 'user') told.push({role, content: withFiles(turn)});
    if (role === 'tool') told.push({role, content, tool_call_id: turn.call});
    if (role === 'assistant' && (content || called)) {
      told.push({
        role,
        content,
        reasoning_content: reasoning || undefined,
        tool_calls: called ? calls.map(({id, ...call}) => ({id, type: 'function', function: call})) : undefined,
      });
    }
  }
  return told;
}

export const toJson = (chats) => JSON.stringify({format: FORMAT, version: 1, chats}, null, 1);

export function toMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}`];
  if (chat.settings.system) parts.push('## System', chat.settings.system);
  if (chat.kind === 'text') return [...parts, path(chat).map((turn) => turn.content).join('')].join('\n\n');
  for (const turn of path(chat)) {
    parts.push(`## ${{user: 'You', tool: `Result of ${turn.name}`}[turn.role] ?? turn.model ?? 'Model'}`);
    if (turn.reasoning) parts.push(turn.reasoning.trim().replace(/^/gm, '> '));
    parts.push(withFiles(turn));
    for (const call of turn.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return `${parts.join('\n\n')}\n`;
}

// Reads an export; takes only fields that are known, each of its type, so that any file is harmless.
export function fromJson(text) {
  const {format, version, chats} = JSON.parse(text);
  if (format !== FORMAT || version !== 1 || !Array.isArray(chats)) throw new Error(`it is not an export of this page ("format": "${FORMAT}", "version": 1)`);
  return chats.map(readChat);
}

const string = (value) => (typeof value === 'string' ? value : '');
const number = (value) => (Number.isFinite(value) ? value : undefined);
const list = (value) => (Array.isArray(value) ? value : []);

function readChat(given) {
  const settings = Object.fromEntries(FIELDS.map((name) => [name, string(given?.settings?.[name])]));
  const chat = newChat(given?.kind === 'text' ? 'text' : 'chat', settings);
  const ids = new Map();
  for (const turn of list(given?.turns)) {
    if (!['user', 'assistant', 'tool'].includes(turn?.role)) continue;
    const made = add(chat, readTurn(turn), ids.get(turn.parent) ?? null);
    ids.set(turn.id, made.id);
    made.at = number(turn.at) ?? made.at;
  }
  chat.tip = ids.get(given?.tip) ?? chat.tip;
  chat.title = string(given?.title).slice(0, 200);
  chat.made = number(given?.made) ?? chat.made;
  chat.changed = number(given?.changed) ?? chat.changed;
  return chat;
}

function readTurn(turn) {
  const {role} = turn;
  const made = {role, content: string(turn.content)};
  if (role === 'tool') return {...made, name: string(turn.name), call: string(turn.call)};
  if (role === 'user') return {...made, files: list(turn.files).map((file) => ({name: string(file?.name), text: string(file?.text)}))};
  const calls = list(turn.calls).map((call) => ({id: string(call?.id), name: string(call?.name), arguments: string(call?.arguments)}));
  const figures = Object.fromEntries(['tokens', 'rate', 'run', 'context', 'thought_s'].map((name) => [name, number(turn[name])]));
  const told = Object.fromEntries(['model', 'finish', 'note'].map((name) => [name, string(turn[name])]));
  return {...made, reasoning: string(turn.reasoning), calls, ...figures, ...told};
}
