import { defineConfig } from "vite";

// What its licence asks of copies; the text is in the package.
const banner = "/*! uPlot, copyright (c) 2022 Leon Sorokin, MIT licence: https://github.com/leeoniya/uPlot */";

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
