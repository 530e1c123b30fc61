#!/bin/bash
set -e
cd /app
echo pearl > sugar.txt
