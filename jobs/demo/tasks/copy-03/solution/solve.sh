#!/bin/bash
set -e
cd /app
cp lemon.txt chalk
