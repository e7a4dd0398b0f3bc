"""How far the work is: a bar on a terminal, a plain line every half minute otherwise."""

import sys
import time

from tqdm import tqdm

INTERVAL = 30       # seconds between two plain lines


class Progress:
    """Documents and megabytes a second, the share that is kept, the time left. By bytes: files differ in size."""

    def __init__(self, label, total_bytes):
        self.label, self.total = label, total_bytes
        self.begin = self.last = time.perf_counter()
        self.bar = None
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, leave=False)

    def __call__(self, documents, kept, read):
        """How much has been done so far: documents seen and kept, bytes read."""
        now = time.perf_counter()
        if now - self.last < (0.2 if self.bar else INTERVAL):
            return
        self.last = now
        if self.bar:
            rate, share = documents / (now - self.begin), kept / max(1, documents)
            self.bar.set_postfix_str(f"{rate:,.0f} documents/s, {share:.0%} kept", refresh=False)
            self.bar.update(read - self.bar.n)
        else:
            print(self.line(documents, kept, read, now - self.begin), flush=True)

    def line(self, documents, kept, read, seconds):
        left = seconds * (self.total - read) / read if read else 0
        return (f"{self.label}: {documents:,} documents, {documents / seconds:,.0f}/s, {read / seconds / 1e6:.1f} MB/s,"
                f" {kept / max(1, documents):.0%} kept, {read / max(1, self.total):.0%} done, "
                f"{left // 60:.0f}:{left % 60:02.0f} left")

    def close(self):
        if self.bar:
            self.bar.close()
