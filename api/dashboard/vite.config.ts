import { readFileSync } from "node:fs";
import { defineConfig } from "vite";

// Its licence asks for its text in copies.
const banner = `/*! uPlot, https://github.com/leeoniya/uPlot\n\n${readFileSync("node_modules/uplot/LICENSE", "utf8")}*/`;

// Fixed names, so that the server lists its files once; it tells versions apart by their ETag.
export default defineConfig({
  base: "./",
  build: {
    target: "es2023",
    cssTarget: "chrome123",
    modulePreload: false,
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        postBanner: banner,
        entryFileNames: "assets/app.js",
        assetFileNames: "assets/app[extname]",
        codeSplitting: false,
      },
    },
  },
  server: { proxy: { "^/(v1|metrics|actors|dashboard/events)": "http://127.0.0.1:8080" } },
});
