#!/bin/bash
set -e
cd /app
cat basil.txt
echo ember > arrow.txt
