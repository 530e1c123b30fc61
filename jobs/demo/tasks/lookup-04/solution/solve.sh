#!/bin/bash
set -e
cd /app
cat lilac.txt
echo lemon > willow.txt
