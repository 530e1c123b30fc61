#!/bin/bash
set -e
cd /app
echo beach > linen.txt
