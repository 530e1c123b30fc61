#!/bin/bash
set -e
cd /app
grep name pebble.txt
echo sage > beach.txt
