// Only what the page uses, as it uses it. The checks of the page's own code need no more.
export type Node = any;
export const Fragment: any;
export function h(type: any, props: Record<string, any> | null, ...children: any[]): Node;
export function render(node: Node, parent: Element): void;
