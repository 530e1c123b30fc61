#!/bin/bash
set -e
cd /app
cat sage.txt
mkdir silver
