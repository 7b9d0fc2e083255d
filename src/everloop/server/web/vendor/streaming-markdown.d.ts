export interface Renderer<T> {
  data: T;
  add_token(data: T, type: number): void;
  end_token(data: T): void;
  add_text(data: T, text: string): void;
  set_attr(data: T, type: number, value: string): void;
}
export function parser<T>(renderer: Renderer<T>): object;
export function parser_write(parser: object, text: string): void;
export const PARAGRAPH: number, HEADING_1: number, HEADING_2: number, HEADING_3: number, HEADING_4: number, HEADING_5: number,
  HEADING_6: number, CODE_BLOCK: number, CODE_FENCE: number, CODE_INLINE: number, ITALIC_AST: number, ITALIC_UND: number,
  STRONG_AST: number, STRONG_UND: number, STRIKE: number, LINK: number, RAW_URL: number, IMAGE: number, BLOCKQUOTE: number,
  LINE_BREAK: number, RULE: number, LIST_UNORDERED: number, LIST_ORDERED: number, LIST_ITEM: number, TABLE: number,
  TABLE_ROW: number, TABLE_CELL: number, HREF: number;
