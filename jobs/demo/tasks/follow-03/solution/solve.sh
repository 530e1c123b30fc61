#!/bin/bash
set -e
cd /app
cat onyx.txt
mkdir basil
