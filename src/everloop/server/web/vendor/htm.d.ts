declare const htm: { bind(make: (...given: any[]) => any): (strings: TemplateStringsArray, ...values: unknown[]) => any };
export default htm;
