/** Web push notifications: turned on by a click, and not sent while the page is visible. */
import { api } from "./api.js";

const WANTED = "everloop.push"; // in this browser
const EVERY = 20_000; // milliseconds between two reports that the page is visible
const page = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const isWanted = () => localStorage.getItem(WANTED) === "1";
export const canPush = () => "serviceWorker" in navigator && "PushManager" in globalThis && "Notification" in globalThis;

/** @param {ArrayBuffer | null} bytes */
const encoded = (bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes ?? new ArrayBuffer(0)))).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");

/** @param {string} text */
const decoded = (text) => Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));

/** Ask for the permission, subscribe, and tell the server. Called by a click. */
export async function subscribe() {
  if ((await Notification.requestPermission()) !== "granted") throw new Error("Notifications are blocked for this page: allow them in the browser's settings of the site.");
  await renew();
  localStorage.setItem(WANTED, "1");
  tellVisibility();
}

/** Send this browser's subscription to the server, because it may have changed. */
async function renew() {
  const { key } = await api("push");
  const { pushManager } = await navigator.serviceWorker.ready;
  const subscription = (await pushManager.getSubscription()) ?? (await pushManager.subscribe({ userVisibleOnly: true, applicationServerKey: decoded(key) }));
  await api("push/subscribe", { endpoint: subscription.endpoint, p256dh: encoded(subscription.getKey("p256dh")), auth: encoded(subscription.getKey("auth")) });
}

export async function unsubscribe() {
  localStorage.removeItem(WANTED);
  const registration = await navigator.serviceWorker?.getRegistration();
  const subscription = await registration?.pushManager?.getSubscription();
  if (!subscription) return;
  await api("push/unsubscribe", { endpoint: subscription.endpoint }).catch(() => undefined);
  await subscription.unsubscribe();
}

let timer = 0;

/** Report to the server whether this page is visible, so that no device is notified of what is being read here. */
export function tellVisibility() {
  if (timer) return;
  const tell = () => {
    if (!isWanted()) return;
    api("push/visible", { page, visible: !document.hidden }, true).catch(() => undefined); // also while the page is being closed
  };
  tell();
  timer = setInterval(() => !document.hidden && tell(), EVERY);
  document.addEventListener("visibilitychange", tell);
}

/** Resume in a browser in which notifications were turned on before. */
export function resume() {
  if (!isWanted() || !canPush() || Notification.permission !== "granted") return;
  tellVisibility();
  renew().catch(() => undefined);
}
