// A browser starts no worker for a page that is read from a folder, and search is one. There, a hidden frame runs
// the worker's script instead. The theme looks for the name IFrameWorker, and the plugin for that of this file.
"use strict"
;(() => {
  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script")
      Object.assign(script, {src: url, onload: resolve, onerror: reject})
      inside.document.body.append(script)
    })

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<body></body>")
      inside.document.close()
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(inside, next)), Promise.resolve())
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      this.ready = load(inside, url)
      this.ready.catch(() => this.dispatchEvent(new ErrorEvent("error", {filename: url})))
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})))
    }

    terminate() {
      this.frame.remove()
    }
  }

  if (location.protocol === "file:") window.Worker = window.IFrameWorker
})()
