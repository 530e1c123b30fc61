#!/bin/bash
set -e
cd /app
cat cedar.txt
mkdir berry
