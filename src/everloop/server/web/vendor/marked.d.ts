export function lexer(text: string, options: { gfm: boolean; breaks: boolean }): any[];
