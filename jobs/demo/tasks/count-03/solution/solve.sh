#!/bin/bash
set -e
cd /app
wc -l < olive.txt > frost.txt
