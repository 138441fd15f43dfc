// One formula a line: reads {"latex", "display"}, answers {"html"} or {"error"}. Macros defined with \gdef stay in `macros`.
const katex = require(process.argv[2]);
const macros = {};
require("readline").createInterface({ input: process.stdin }).on("line", (line) => {
  const { latex, display } = JSON.parse(line);
  let answer;
  try {
    answer = { html: katex.renderToString(latex, { displayMode: display, throwOnError: true, strict: "error", macros }) };
  } catch (error) {
    answer = { error: error.message };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
});
