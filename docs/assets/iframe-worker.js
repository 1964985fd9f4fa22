// Search when a page is opened from a disk: browsers refuse a Worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const home = new URL(address, location);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      this.inside = inside;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      inside.importScripts = (...addresses) =>
        addresses.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      const load = (next) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(next, home);
          script.onload = done;
          script.onerror = failed;
          inside.document.body.append(script);
        });
      load(home).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.give(data));
      });
    }
    give(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }
    postMessage(data) {
      if (this.ready) this.give(data);
      else this.waiting.push(data);
    }
    terminate() {}
  };
}
