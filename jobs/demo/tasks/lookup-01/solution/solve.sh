#!/bin/bash
set -e
cd /app
grep color lemon.txt
echo orchid > flint.txt
