// Chats in IndexedDB: `heads` has what the list shows, `chats` the whole. Where there is no
// database (some private windows), chats live as long as the page.

const memory = {heads: new Map(), chats: new Map()};
let opening;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open('clocher', 1);
    request.onupgradeneeded = () => {
      for (const name of Object.keys(memory)) request.result.createObjectStore(name, {keyPath: 'id'});
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }).catch(() => null);
  return opening;
}

// Runs `work` on both stores; resolves, once all is on disk, to what its request found.
async function transact(mode, work, fallback) {
  const open = await database();
  if (!open) return fallback();
  return new Promise((resolve, reject) => {
    const transaction = open.transaction(Object.keys(memory), mode);
    const request = work((name) => transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

// Other tabs are told what has changed.
const channel = new BroadcastChannel('clocher');
export const onOtherTab = (heard) => { channel.onmessage = ({data}) => heard(data); };

export const heads = () => transact('readonly', (at) => at('heads').getAll(), () => [...memory.heads.values()]);
export const chats = () => transact('readonly', (at) => at('chats').getAll(), () => [...memory.chats.values()]);
export const load = (id) => transact('readonly', (at) => at('chats').get(id), () => memory.chats.get(id));

export async function save(head, chat) {
  await transact('readwrite', (at) => void (at('heads').put(head), at('chats').put(chat)), () => {
    memory.heads.set(head.id, head);
    memory.chats.set(chat.id, chat);
  });
  channel.postMessage(chat.id);
}

export async function remove(id) {
  await transact('readwrite', (at) => void (at('heads').delete(id), at('chats').delete(id)), () => {
    memory.heads.delete(id);
    memory.chats.delete(id);
  });
  channel.postMessage(id);
}
