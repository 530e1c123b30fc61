#!/bin/bash
set -e
cd /app
cp apple.txt meadow
