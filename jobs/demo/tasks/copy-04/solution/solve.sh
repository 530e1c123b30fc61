#!/bin/bash
set -e
cd /app
cp berry.txt island
