#!/bin/bash
set -e
cd /app
mv berry.txt pebble.txt
