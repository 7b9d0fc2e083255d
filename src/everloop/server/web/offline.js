/**
 * The service worker: shows the page's own files while the server cannot be reached. What the server answers always comes
 * first, and nothing of the API is kept.
 */
const worker = /** @type {any} */ (globalThis);
const CACHE = "everloop";

worker.addEventListener("install", (/** @type {any} */ event) => event.waitUntil(keepFirstLoad().then(() => worker.skipWaiting())));

worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  const isOwn = origin === location.origin && (pathname === "/" || pathname.startsWith("/web/"));
  if (isOwn && request.method === "GET") event.respondWith(fromServer(request, pathname));
});

/** Keep the page and what its head names. */
async function keepFirstLoad() {
  const cache = await caches.open(CACHE);
  const page = await fetch("/");
  const names = (await page.clone().text()).matchAll(/(?:href|src)="(\/web\/[^"]+)"/g);
  await cache.put("/", page);
  await cache.addAll([...new Set([...names].map((found) => found[1]))]);
}

/**
 * @param {Request} request
 * @param {string} path
 */
async function fromServer(request, path) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(path, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(path);
    if (kept) return kept;
    throw error;
  }
}
