#!/bin/bash
set -e
cd /app
rm $(grep -l meadow *)
