#!/bin/bash
set -e
cd /app
cat pearl.txt
echo meadow > chalk.txt
