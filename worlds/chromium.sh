#!/bin/sh
# Chromium, each of whose processes may have 1.5 GiB of memory of its own (chromium.py, launch_options). A page
# that takes more crashes, alone: without a bound one page can take the machine, and the run with it.
ulimit -S -d 1572864 && exec "$DYNAWEB_BOUNDED" "$@"
