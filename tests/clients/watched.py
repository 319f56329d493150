"""What it costs to be looked at: two servers of the same program, one of them with open dashboards, measured in turns.

    python3 tests/clients/watched.py --server target/release/tokenrouter

Prints what `tokenrouter bench serve --compare` prints: the first server is alone, the second is watched; and the CPU time that
each took for the same work, which other programs disturb less. Readers take every event of /dashboard/events, and /metrics
once a second, as the page and a scraper do.
"""

import argparse
import os
import subprocess
import threading
import time
import urllib.request


def start(server):
    """A server on a free port, and its address."""
    process = subprocess.Popen([server, "serve", "--port", "0", "--log-level", "warn"], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("serving"):
            return process, line.split()[1].removesuffix("/v1")
    raise SystemExit("the server did not start")


def look(address, stop, seen):
    """Reads events until it is told to stop."""
    with urllib.request.urlopen(address + "/dashboard/events") as events:
        for line in events:
            seen[0] += line.startswith(b"event: state")
            if stop.is_set():
                return


def scrape(address, stop):
    while not stop.wait(1.0):
        urllib.request.urlopen(address + "/metrics").read()


def cpu_seconds(process):
    """Of a server so far, all its threads together."""
    with open(f"/proc/{process.pid}/stat") as stat:
        user, system = stat.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--server", required=True, help="the tokenrouter program")
    options.add_argument("--readers", type=int, default=1, help="open dashboards")
    options.add_argument("--concurrency", default="8", help="requests at once")
    options.add_argument("--requests", default="4000", help="requests in all")
    options = options.parse_args()
    (alone, alone_at), (watched, watched_at) = start(options.server), start(options.server)
    stop, seen = threading.Event(), [0]
    try:
        for _ in range(options.readers):
            threading.Thread(target=look, args=(watched_at, stop, seen), daemon=True).start()
        threading.Thread(target=scrape, args=(watched_at, stop), daemon=True).start()
        began, before = time.time(), [cpu_seconds(server) for server in (alone, watched)]
        bench = [options.server, "bench", "serve", "--url", alone_at, "--compare", watched_at, "--blocks", "40", "--quiet",
                 "--requests", options.requests, "--concurrency", options.concurrency, "--output-tokens", "100",
                 "--ignore-eos"]
        subprocess.run(bench, check=True)
        one, other = (cpu_seconds(server) - was for server, was in zip((alone, watched), before))
        print(f"CPU time: alone {one:.2f} s, watched {other:.2f} s, ratio {other / one:.4f}")
        print(f"{seen[0]} states were read in {time.time() - began:.0f} s")
    finally:
        stop.set()
        for process in (alone, watched):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
